"""A group made of several: the results of one, over torch.distributed groups and our own."""

import json

import pytest
import torch
import torch.distributed as dist
import unisono
from ranks import outcome_of
from torch import nn
from torch_group import torch_group
from unisono.group import resolve


def groups(k):
    return [dist.new_group(backend="gloo") for _ in range(k)]


def train(group, steps=6, batch_norm=False):
    torch.manual_seed(resolve(group).rank())
    norm = unisono.SyncBatchNorm(50, process_group=group) if batch_norm else nn.Identity()
    model = nn.Sequential(nn.Linear(20, 50), norm, nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    ddp = unisono.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0002)
    for _ in range(steps):
        ddp(torch.randn(8, 20)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
        model.zero_grad()
    assert ddp.replicas_identical() and len(ddp.bucket_sizes) >= 3
    return ddp.digest()


def one_and_three(batch_norm):
    with torch_group("gloo"):
        one, = groups(1)
        robin = unisono.round_robin(groups(3))
        assert robin.name == "round-robin(c10d/gloo, c10d/gloo, c10d/gloo)"
        return train(one, batch_norm=batch_norm), train(robin, batch_norm=batch_norm)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "sync-batch-norm"])
@pytest.mark.parametrize("size", [2, 3])
def test_three_gloo_groups_give_the_bits_of_one(on_ranks, size, batch_norm):
    results = on_ranks(size, one_and_three, batch_norm, group=False)
    assert len({digest for both in results for digest in both}) == 1, results


def of_our_own_and_of_torch():
    shm = [unisono.init(timeout=60, start_timeout=60) for _ in range(2)]
    with torch_group("gloo"):
        robin = unisono.round_robin([shm[0], *groups(1), shm[1]])
        sums = []
        for i in range(7):
            t = torch.full((3,), float(robin.rank() + i))
            robin.all_reduce(t).wait()
            sums.append(t.tolist())
        digest = train(robin, batch_norm=True)
    return robin.name, sums, digest


def test_groups_of_several_kinds(on_ranks):
    results = on_ranks(2, of_our_own_and_of_torch, group=False)
    assert results[0] == results[1]
    assert results[0][:2] == ("round-robin(shm, c10d/gloo, shm)", [[1.0 + 2 * i] * 3 for i in range(7)])


def priorities():
    with torch_group("gloo"):
        robin = unisono.round_robin(groups(3))
        model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(6)])
        ddp = unisono.DistributedDataParallel(model, process_group=robin, bucket_cap_mb=0.004)
        ddp.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.01), overlap_forward=True)
        for _ in range(5):
            ddp(torch.randn(4, 40)).square().mean().backward()
        return ddp.replicas_identical()


def test_the_next_forward_may_overlap(on_ranks):
    assert on_ranks(2, priorities, group=False) == [True, True]


def abort_one():
    with torch_group("gloo"):
        inner = groups(3)
        robin = unisono.round_robin(inner)
        robin.all_reduce(torch.ones(3)).wait()
        if robin.rank() == 0:
            resolve(inner[1]).abort("the operator pulled the plug")
        outcomes = [outcome_of(lambda: robin.all_reduce(torch.ones(3)).wait()) for _ in range(3)]
        return [outcome.message for outcome in outcomes if outcome is not None]


def test_an_abort_of_one_group_is_told_by_all(on_ranks):
    for messages in on_ranks(2, abort_one, group=False):
        assert len(messages) == 3, messages  # the first call is the aborted group's turn
        assert all("round robin, group 1 of 3 (c10d/gloo)" in m and "pulled the plug" in m for m in messages), messages


def refused():
    with torch_group("gloo"):
        group = groups(1)[0]
        dist.barrier()  # or one rank leaves while the other still connects
        return [outcome_of(unisono.round_robin, given) for given in ([], [group, group], [group, "gloo"])]


def test_what_cannot_be_one(on_ranks):
    for none, twice, text in on_ranks(2, refused, group=False):
        assert "no group was given" in none.message and none.type == "InvalidArgumentError"
        assert "group 1 was given before" in twice.message
        assert text.type == "TypeError"


def test_the_benchmark_runs(unisono_command, tmp_path):
    out = tmp_path / "rows.json"
    done = unisono_command("bench", "round-robin", "--quick", "--groups", "1,2", "--model", "tiny", "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["bench"], row["impl"]) for row in rows] == [
        (bench, impl) for bench, rival in (("round-robin", "gloo"), ("round-robin-step", "torch-ddp-gloo"))
        for impl in (rival, "round-robin of 1", "round-robin of 2")]
    assert all(row["count"] == 3 and 0 < row["min_s"] <= row["median_s"] for row in rows)
