"""Mistakes a user makes: each is an error that names the thing at fault, on every rank, within its deadline."""

import os
import signal
import time

import pytest
import torch
import unisono
from ranks import RanksFailed, outcome_of
from torch import nn
from unisono import DistributedDataParallel


def linear(out=1):
    return nn.Linear(4, out, bias=False)


def net(*names, **replaced):
    """A module with Linear(4 -> 1) children of these names, in this order."""
    module = nn.Module()
    for name in names:
        module.add_module(name, replaced.get(name) or linear())
    return module


def build(kind, rank):
    if kind == "order":
        return net("a", "b") if rank == 0 else net("b", "a")
    if kind == "count":
        return net("a", "b") if rank == 0 else net("a")
    if kind == "shape":
        return net("a", "b", b=linear(1 if rank == 0 else 2))
    if kind == "dtype":
        return net("a", "b", b=linear().to(torch.float32 if rank == 0 else torch.float64))
    if kind == "frozen":
        module = net("a", "b")
        module.b.weight.requires_grad_(rank == 0)
        return module
    if kind == "buffer":  # E4
        module = net("a")
        module.register_buffer("q", torch.zeros(2 if rank == 0 else 3))
        module.register_buffer("r", torch.tensor([9.0]))
        return module
    raise ValueError(kind)


def wrap_mismatched(group, kind):
    return outcome_of(lambda: DistributedDataParallel(build(kind, group.rank()), process_group=group))


@pytest.mark.parametrize("kind, words", [
    ("order", ["a.weight", "b.weight", "0"]),  # A4
    ("count", ["b.weight"]),  # A5
    ("shape", ["b.weight", "1, 4", "2, 4"]),
    ("dtype", ["b.weight"]),
    ("frozen", ["b.weight", "requires grad", "no grad"]),
    ("buffer", ["q", "2", "3"]),  # E4
])
def test_replicas_that_differ(on_ranks, kind, words):
    first, second = on_ranks(2, wrap_mismatched, kind)
    assert first.type == second.type == "MismatchError", (first, second)
    assert first.message == second.message
    for word in words:
        assert word in first.message, first.message


def wrap_options(group):
    return outcome_of(lambda: DistributedDataParallel(linear(), process_group=group, bucket_cap_mb=1 + group.rank()))


def test_options_that_differ(on_ranks):
    first, second = on_ranks(2, wrap_options)
    assert first.type == second.type == "MismatchError"
    assert "bucket_cap_mb" in first.message
    assert first.message == second.message


def collective_mismatch(group, kind):
    a = torch.ones(100)
    calls = {
        "size": lambda: group.all_reduce(a[:2 + group.rank()].clone()),
        "large size": lambda: group.all_reduce(torch.ones(100_000 * (1 + group.rank()))),
        "dtype": lambda: group.all_reduce(a if group.rank() == 0 else a.int()),
        "op": lambda: group.all_reduce(a, op="sum" if group.rank() == 0 else "max"),
        "operation": lambda: group.all_reduce(a) if group.rank() == 0 else group.broadcast(a),
    }
    begin = time.monotonic()
    first = outcome_of(lambda: calls[kind]().wait())
    seconds = time.monotonic() - begin
    return first, outcome_of(lambda: group.barrier().wait()), seconds < 20


@pytest.mark.parametrize("kind, words", [
    ("size", ["2", "3"]), ("large size", ["100000", "200000"]),  # A1
    ("dtype", ["f32", "i32"]), ("op", ["sum", "max"]), ("operation", ["all_reduce", "broadcast"]),  # A2
])
def test_collectives_that_differ(on_ranks, kind, words):
    for first, later, in_time in on_ranks(2, collective_mismatch, kind):
        assert first.type == "MismatchError", first
        assert all(word in first.message for word in words), first.message
        assert later.type == "MismatchError"
        assert in_time


def leaves_early(path, rank, size):
    """A7. The group has a deadline of 2 s."""
    os.environ["UNISONO_STORE"] = f"file:{path}"
    group = unisono.init(timeout=2, start_timeout=30)
    ddp = DistributedDataParallel(linear(), process_group=group)
    for step in range(5):
        if rank == 1 and step == 3:
            time.sleep(4)
            return None
        result = outcome_of(lambda: ddp(torch.ones(1, 4)).sum().backward())
        if result is not None:
            return result, step
    return None


def with_rank(function, *args):
    return function(*args, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def test_a_rank_that_leaves_the_loop(on_ranks, tmp_path):
    (result, step), _ = on_ranks(2, with_rank, leaves_early, str(tmp_path / "store"), group=False)
    assert step == 3
    assert result.type == "TimeoutError"
    assert "TimeoutError" in result.bases[1:]  # Python's own, too
    assert "rank 1" in result.message
    assert "bucket 0" in result.message
    assert "step 3" in result.message


def killed_in_a_step(group, sent):
    ddp = DistributedDataParallel(linear(), process_group=group)
    ddp(torch.ones(1, 4)).sum().backward()
    if group.rank() == 1:
        os.kill(os.getpid(), sent)
    begin = time.monotonic()
    result = outcome_of(lambda: ddp(torch.ones(1, 4)).sum().backward())
    raise RuntimeError(f"{result.type}: {result.message} [{'soon' if time.monotonic() - begin < 5 else 'late'}]")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSEGV])
def test_a_peer_that_dies(on_ranks, sent):
    with pytest.raises(RanksFailed) as raised:
        on_ranks(2, killed_in_a_step, sent)
    text = str(raised.value)
    assert f"rank 1 died:\nexit code {-sent}" in text
    assert "PeerLostError" in text
    assert "rank 1" in text.split("PeerLostError")[1]
    assert "[soon]" in text


def refusals(group):
    integer = nn.Module()
    integer.weight = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    frozen = linear()
    frozen.weight.requires_grad_(False)
    return [outcome_of(lambda m=module: DistributedDataParallel(m, process_group=group)) for module in (integer, frozen)]


def test_nothing_to_train(on_ranks):
    for result in on_ranks(1, refusals)[0]:
        assert "InvalidArgumentError" in result.bases
        assert "ValueError" in result.bases
        assert "requires" in result.message


WRONG = {
    "dim": ({"dim": 1}, NotImplementedError, "dim=1"),
    "delayed alone": ({"delay_all_reduce_named_params": []}, ValueError, "together or not at all"),
    "trigger alone": ({"param_to_hook_all_reduce": 1}, ValueError, "together or not at all"),
    "mixed_precision": ({"mixed_precision": 3}, TypeError, "mixed_precision is a int"),
    "another device": ({"device_ids": [0]}, ValueError, "parameters are on cpu"),
    "two devices": ({"device_ids": [0, 1]}, ValueError, "one device per rank"),
    "output_device alone": ({"output_device": 0}, ValueError, "output_device without device_ids"),
    "a cap": ({"bucket_cap_mb_list": [1, -1]}, ValueError, "bucket_cap_mb is -1"),
    "a policy": ({"buffer_policy": "median"}, ValueError, "median"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_keywords(what):
    keywords, error, said = WRONG[what]
    with pytest.raises(error, match=said):
        DistributedDataParallel(linear(), **keywords)


@pytest.mark.parametrize("keywords", [
    {"skip_all_reduce_unused_params": True}, {"batched_grad_copy": True}, {"bucket_cap_mb_list": [0, 1]},
    {"device_ids": []}, {"device_ids": [torch.device("cpu")]}], ids=str)
def test_keywords_that_are_taken(keywords):
    layer = linear()
    DistributedDataParallel(layer, **keywords)(torch.ones(1, 4)).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0] * 4]


def test_every_keyword_of_torch_is_known():
    import inspect

    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    assert [name for name in theirs if name not in ours] == []


@pytest.mark.parametrize("call, words", [
    (lambda: DistributedDataParallel("not a module"), "str, not a torch.nn.Module"),
    (lambda: DistributedDataParallel(linear(), process_group=3), "process_group is a int"),
])
def test_wrong_types(call, words):
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize("env, words", [
    ({"RANK": "0"}, "WORLD_SIZE"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "port"}, "MASTER_PORT"),
])
def test_a_missing_or_contradictory_environment(monkeypatch, env, words):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "UNISONO_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(unisono.InvalidArgumentError, match=words):
        unisono.init(start_timeout=5)


def test_a_missing_rank(monkeypatch, tmp_path):
    """H6."""
    monkeypatch.setenv("UNISONO_STORE", f"file:{tmp_path / 'store'}")
    begin = time.monotonic()
    with pytest.raises(unisono.TimeoutError, match="rank 1"):
        unisono.init(rank=0, size=2, start_timeout=1)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("seconds", [0, -1, 1e12])
def test_deadlines_that_make_no_sense(seconds):
    with pytest.raises((unisono.InvalidArgumentError, OverflowError)):
        unisono.init(timeout=seconds)


def test_bad_tensors():
    group = unisono.init(rank=0, size=1)
    with pytest.raises(unisono.InvalidArgumentError, match="contiguous"):
        group.all_reduce(torch.ones(4, 4).t()[:2])
    with pytest.raises(unisono.InvalidArgumentError, match="unknown reduce op 'median'"):
        group.all_reduce(torch.ones(4), op="median")
    group.all_reduce(torch.ones(4)).wait()


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, -1.0, 0.0])
def test_a_timeout_that_is_none(on_ranks, seconds):
    raised, = on_ranks(1, outcome_of, unisono.init, "serial", -1, -1, seconds, group=False)
    assert raised.type == "InvalidArgumentError" and "it must be above 0 and below 1e9" in raised.message
