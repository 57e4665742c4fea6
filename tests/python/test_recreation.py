"""Groups that lose ranks, gain ranks, or begin again, in processes that go on."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import unisono
from ranks import outcome_of
from test_init import clean_environment, free_port
from torch import nn
from torch_group import torch_group
from unisono.group import resolve

HARD_LIMIT_S = 100

# Arguments: how many steps, which rank kills itself in the middle of step 7's backward, or "none".
TRAIN = r"""
import os, signal, sys, torch, unisono
from torch import nn

torch.set_num_threads(1)
steps, victim = int(sys.argv[1]), sys.argv[2]
start = dict(timeout=60, start_timeout=60)
group = unisono.init(**start)
torch.manual_seed(group.rank())
model = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
ddp = unisono.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.004)

step = 0
def die(_):
    if step == 7 and str(group.rank()) == victim:
        os.kill(os.getpid(), signal.SIGKILL)
model[3].weight.register_hook(die)

def train(until):
    global step
    while step < until:
        ddp(torch.randn(8, 20)).square().mean().backward()
        with torch.no_grad():  # by hand: the first optimizer of a process makes torch import for seconds
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
        model.zero_grad()
        step += 1

def go_on_from_rank_0():
    global step
    done = torch.tensor([step])
    group.broadcast(done).wait()
    step = int(done)

def report():
    digest = ddp.digest()
    assert ddp.replicas_identical()
    print("done", group.rank(), group.size(), step, digest, flush=True)
"""

SURVIVE = TRAIN + r"""
while step < steps:
    try:
        train(steps)
    except unisono.PeerLostError as error:
        print("lost", group.lost_ranks(), flush=True)
        group = group.without(group.lost_ranks(), start_timeout=30)
        victim = "none"
        if sys.argv[3] == "set_group":
            ddp.set_group(group)
        go_on_from_rank_0()
    if sys.argv[3] == "wrap" and ddp.process_group is not group:
        del ddp
        ddp = unisono.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.004)
ddp.sync_state()
report()
"""

GROW = TRAIN + r"""
if group.size() == 2:
    train(5)
    group = unisono.init(rank=group.rank(), size=3, store=group.store, prefix="three", **start)
    ddp.set_group(group)
go_on_from_rank_0()
train(steps)
ddp.sync_state()
report()
"""


class Ranks:
    """Processes that run a script; all are gone at the end."""

    def __init__(self):
        self.processes = []

    def start(self, script, *args, **variables):
        self.processes.append(subprocess.Popen([sys.executable, "-c", script, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                               text=True, env=clean_environment(**variables)))

    def finish(self):
        """(exit code, lines, errors) of each."""
        ended = []
        for process in self.processes:
            out, err = process.communicate(timeout=HARD_LIMIT_S)
            ended.append((process.returncode, out.splitlines(), err))
        return ended


@pytest.fixture
def ranks():
    ranks = Ranks()
    yield ranks
    for process in ranks.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def done_lines(ended):
    for code, _, err in ended:
        assert code == 0, err
    return [lines[-1].split() for _, lines, _ in ended]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", ["wrap", "set_group"])
def test_survivors_of_a_killed_rank_train_on(ranks, tmp_path, how, victim):
    for rank in range(3):
        ranks.start(SURVIVE, "20", str(victim), how, RANK=rank, WORLD_SIZE=3, UNISONO_STORE=f"file:{tmp_path}/store")
    ended = ranks.finish()
    assert ended.pop(victim)[0] == -signal.SIGKILL
    assert [lines[0] for _, lines, _ in ended] == [f"lost [{victim}]"] * 2
    first, second = done_lines(ended)
    assert [first[1:4], second[1:4]] == [["0", "2", "20"], ["1", "2", "20"]]
    assert first[4] == second[4]


def test_a_store_that_went_with_rank_0_is_told(ranks):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for rank in range(3):
        ranks.start(SURVIVE, "20", "0", "set_group", RANK=rank, WORLD_SIZE=3, **where)
    ended = ranks.finish()
    assert ended.pop(0)[0] == -signal.SIGKILL
    for code, lines, err in ended:
        assert code == 1 and lines == ["lost [0]"]
        assert "PeerLostError" in err.splitlines()[-1] and "the store does not answer" in err, err


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_third_rank_joins_two_that_train(ranks, tmp_path, store):
    where = {"UNISONO_STORE": f"file:{tmp_path}/store"} if store == "file" else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for rank in range(2):
        ranks.start(GROW, "12", "none", RANK=rank, WORLD_SIZE=2, **where)
    newcomer = GROW.replace("unisono.init(**start)", 'unisono.init(prefix="three", **start)', 1)
    ranks.start(newcomer, "12", "none", RANK=2, WORLD_SIZE=3, **where)
    lines = done_lines(ranks.finish())
    assert [line[1:4] for line in lines] == [[str(rank), "3", "12"] for rank in range(3)]
    assert len({line[4] for line in lines}) == 1


def train_a_little(group, model=None, wrapper=None):
    model = model or nn.Linear(4, 2)
    ddp = wrapper or unisono.DistributedDataParallel(model, process_group=group)
    ddp(torch.full((3, 4), float(resolve(group).rank()))).sum().backward()
    return ddp, model.weight.grad.clone()


def again_on_one_store():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["UNISONO_STORE"].removeprefix("file:") + ".torch", -1)
    sums = []
    for _ in range(3):
        group = unisono.init(rank=rank, size=size, store=store, prefix="mine", timeout=30, start_timeout=30)
        t = torch.ones(2)
        group.all_reduce(t).wait()
        sums.append(t.tolist())
        assert group.store is not None
        del group
    for _ in range(2):
        dist.init_process_group("unisono", store=store, rank=rank, world_size=size)
        t = torch.ones(2)
        dist.all_reduce(t)
        sums.append(t.tolist())
        dist.destroy_process_group()
    return sums


def test_groups_one_after_the_other_on_one_store_and_prefix(on_ranks):
    assert on_ranks(2, again_on_one_store, group=False) == [[[2.0, 2.0]] * 5] * 2


def again_over_hosts(part):
    os.environ["UNISONO_HOST_PART"] = part[int(os.environ["RANK"])]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["UNISONO_STORE"].removeprefix("file:") + ".torch", -1)
    sums, names = [], []
    for _ in range(3):
        dist.init_process_group("unisono", store=store, rank=rank, world_size=size)
        names.append(resolve(dist.group.WORLD).name)
        pair = dist.new_group([0, 3])
        t = torch.ones(2)
        dist.all_reduce(t)
        if rank in (0, 3):
            dist.all_reduce(t, group=pair)
            dist.send(t, 3) if rank == 0 else dist.recv(t, 0)
        sums.append(t.tolist())
        dist.destroy_process_group()
    return names, sums


@pytest.mark.parametrize(("part", "name"), [("aabb", "hierarchy"), ("abcd", "c10d")])
def test_groups_over_hosts_one_after_the_other_on_one_store(on_ranks, part, name):
    for rank, (names, sums) in enumerate(on_ranks(4, again_over_hosts, part, group=False)):
        assert all(made.startswith(name) for made in names)
        assert sums == [[8.0, 8.0] if rank in (0, 3) else [4.0, 4.0]] * 3


def leave_a_torch_group():
    with torch_group("unisono") as world:
        group = resolve(world)
        if group.rank() == 1:
            return None
        lost = outcome_of(lambda: group.barrier().wait())
        rest = group.without([1])
        t = torch.tensor([float(group.rank())])
        rest.all_reduce(t).wait()
        return lost.type, rest.rank(), rest.size(), t.item()


def test_ranks_of_torchs_unisono_group_go_on_without_one(on_ranks):
    assert on_ranks(3, leave_a_torch_group, group=False) == [("PeerLostError", 0, 2, 2.0), None, ("PeerLostError", 1, 2, 2.0)]


def refused(group):
    with torch_group("gloo") as world:
        theirs = resolve(world)
        dist.barrier()  # or one rank leaves while the other still connects
        return [outcome_of(group.without, [group.rank()]), outcome_of(group.without, [7]), outcome_of(theirs.without, []),
                outcome_of(theirs.lost_ranks), theirs.store, group.lost_ranks()]


def test_what_cannot_be_left_out(on_ranks):
    for itself, unknown, over_torch, lost, store, nobody in on_ranks(2, refused):
        assert all(raised.type == "InvalidArgumentError" for raised in (itself, unknown, over_torch, lost))
        assert "this rank itself" in itself.message and "there is no rank 7" in unknown.message
        assert "torch.distributed" in over_torch.message
        assert store is None and nobody == []


def wrap_again(group):
    ddp, first = train_a_little(group)
    model = ddp.module
    refused = outcome_of(lambda: unisono.DistributedDataParallel(model, process_group=group))
    del ddp
    model.zero_grad()
    ddp, second = train_a_little(group, model)
    return refused.message, torch.equal(first, second), len(ddp.bucket_sizes)


def test_a_module_is_wrapped_again_when_its_wrapper_is_gone(on_ranks):
    for message, same, buckets in on_ranks(2, wrap_again):
        assert "has been wrapped before" in message and "destroy the other wrapper first" in message
        assert same and buckets == 1


def move(group):
    ddp, first = train_a_little(group)
    model = ddp.module
    ddp.set_transform(unisono.transforms.bf16())
    with torch.no_grad():
        model.weight += group.rank()  # as after a step that not all have taken
    second = unisono.init(timeout=30, start_timeout=30)
    ddp.set_group(second)
    none = model.weight.grad is None
    identical = ddp.replicas_identical()
    group.abort("nobody needs it any more")
    _, after = train_a_little(second, model, ddp)
    return none, identical, torch.equal(first, after), ddp.process_group is second, ddp._core.transform().name


def test_a_wrapper_goes_on_with_another_group(on_ranks):
    assert on_ranks(2, move) == [(True, True, True, True, "bf16")] * 2
