"""A torch.distributed group (Gloo) behind unisono's contract, as `DistributedDataParallel(process_group=...)` uses it."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import unisono
from ranks import RanksFailed, outcome_of
from torch import nn
from torch_group import torch_group
from unisono import _C
from unisono.group import resolve

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
          torch.bool]
COMBINE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul, "bit_and": torch.bitwise_and,
           "bit_or": torch.bitwise_or, "bit_xor": torch.bitwise_xor}


def values(rank, n, dtype):
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randint(0, 2 if dtype == torch.bool else 5, (n,), generator=generator).to(dtype)


def reduce_all(dtype, n):
    with torch_group("gloo") as world:
        group = _C.from_torch(world)
        assert group.name == "c10d/gloo" and group.size() == dist.get_world_size()
        ops = ["sum", "min", "max", "product"]
        ops += ["avg"] if dtype.is_floating_point else ["bit_and", "bit_or", "bit_xor"]
        out = {}
        for op in ops:
            t = values(group.rank(), n, dtype)
            group.all_reduce(t, op).wait()
            out[op] = t
        return out


def expected(op, dtype, n, size):
    out = values(0, n, dtype)
    for rank in range(1, size):
        more = values(rank, n, dtype)
        if op == "avg":
            out = out + more
        elif dtype == torch.bool:
            out = {"sum": torch.logical_or, "max": torch.logical_or, "bit_or": torch.logical_or,
                   "bit_xor": torch.logical_xor}.get(op, torch.logical_and)(out, more)
        else:
            out = COMBINE[op](out, more)
    return (out.float() / size).to(dtype) if op == "avg" and dtype != torch.float64 else out / size if op == "avg" else out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce(on_ranks, dtype, size):
    for n in (0, 1, 1003):
        for result in on_ranks(size, reduce_all, dtype, n, group=False):
            for op, t in result.items():
                assert torch.equal(t, expected(op, dtype, n, size)), (op, n)


def half_sums(dtype, small):
    with torch_group("gloo") as world:
        group = _C.from_torch(world)
        t = torch.tensor([1.0 if group.rank() == 0 else small], dtype=dtype)
        group.all_reduce(t).wait()
        return t.item()


@pytest.mark.parametrize("dtype, small", [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)], ids=str)
def test_halves_are_accumulated_in_float(on_ranks, dtype, small):  # E8: rounded at every step it would stay 1
    exact = torch.tensor(1 + 3 * small, dtype=torch.float64).to(dtype).item()
    assert exact != 1
    assert on_ranks(4, half_sums, dtype, small, group=False) == [exact] * 4


def moving(dtype):
    with torch_group("gloo") as world:
        group = _C.from_torch(world)
        t = values(group.rank(), 7, dtype)
        group.broadcast(t, 1).wait()
        out = torch.zeros(7 * group.size(), dtype=dtype)
        group.all_gather(out, values(group.rank(), 7, dtype)).wait()
        group.barrier().wait()
        return t, out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_and_all_gather(on_ranks, dtype):
    for t, out in on_ranks(2, moving, dtype, group=False):
        assert torch.equal(t, values(1, 7, dtype))
        assert torch.equal(out, torch.cat([values(0, 7, dtype), values(1, 7, dtype)]))


def many_in_flight():
    with torch_group("gloo") as world:
        group = _C.from_torch(world)
        assert _C.from_torch(world) is group or _C.from_torch(world).rank() == group.rank()
        tensors = [torch.full((1 + 37 * i,), float(group.rank() + i)) for i in range(40)]
        works = [group.all_reduce(t) for t in tensors]
        for work in reversed(works):
            work.wait()
        unwaited = torch.full((5,), 1.0)
        group.all_reduce(unwaited)
        group.barrier().wait()
        polled = group.all_reduce(unwaited.clone())
        while not polled.poll():
            pass
        return [t.unique().tolist() for t in tensors], unwaited.tolist()


def test_many_calls_in_flight_waited_for_in_any_order(on_ranks):
    for sums, _ in on_ranks(3, many_in_flight, group=False):
        assert sums == [[3.0 * i + 3] for i in range(40)]


def mismatched(kind):
    with torch_group("gloo") as world:
        group = _C.from_torch(world)
        rank = group.rank()
        calls = {
            "count": lambda: group.all_reduce(torch.ones(2 + rank)).wait(),
            "dtype": lambda: group.all_reduce(torch.ones(2, dtype=(torch.float32, torch.int32)[rank])).wait(),
            "operation": lambda: (group.all_reduce(torch.ones(2)) if rank else group.broadcast(torch.ones(2), 0)).wait(),
            "op": lambda: group.all_reduce(torch.ones(2), ("sum", "max")[rank]).wait(),
            "root": lambda: group.broadcast(torch.ones(2), rank).wait(),
        }
        return outcome_of(calls[kind]), outcome_of(lambda: group.all_reduce(torch.ones(2)).wait())


@pytest.mark.parametrize("kind, words", [("count", ["2 x", "3 x"]), ("dtype", ["f32", "i32"]), ("op", ["sum", "max"]),
                                         ("operation", ["broadcast", "all_reduce"]), ("root", ["root 0", "root 1"])])
def test_calls_that_differ(on_ranks, kind, words):
    (first, later_first), (second, later_second) = on_ranks(2, mismatched, kind, group=False)
    assert first.type == second.type == later_first.type == later_second.type == "MismatchError", (first, later_first)
    assert first.message == second.message == later_first.message == later_second.message
    for word in words:
        assert word in first.message
    assert "unusable" in first.message


def default_store():
    return dist.distributed_c10d._get_default_store()


def stay_away():
    with torch_group("gloo", timeout=2) as world:
        group = _C.from_torch(world)
        if group.rank() == 1:
            default_store().wait(["done"])
            return None
        result = outcome_of(lambda: group.all_reduce(torch.ones(2)).wait())
        default_store().set("done", "1")
        return result


def test_a_rank_that_does_not_come_is_named(on_ranks):
    first, _ = on_ranks(2, stay_away, group=False)
    assert first.type == "TimeoutError", first
    assert "rank 1 has not entered" in first.message
    assert "all_reduce 0" in first.message


def aborted():
    with torch_group("gloo", timeout=60) as world:
        group = _C.from_torch(world)
        group.barrier().wait()
        if group.rank() == 1:
            group.abort("enough of it")
            default_store().wait(["done"])  # alive, and its connections open: only the notice can tell rank 0
            return outcome_of(group.barrier)
        begin = time.monotonic()
        result = outcome_of(lambda: group.all_reduce(torch.ones(2)).wait()), time.monotonic() - begin
        default_store().set("done", "1")
        return result


def test_abort_reaches_a_rank_that_waits(on_ranks):
    (first, seconds), second = on_ranks(2, aborted, group=False)
    assert first.type == second.type == "PeerLostError"
    assert "enough of it" in first.message and "enough of it" in second.message
    assert seconds < 30, "noticed by itself, not by the deadline of 60 s"


def killed_peer():
    with torch_group("gloo", timeout=60) as world:
        group = _C.from_torch(world)
        group.barrier().wait()
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raised = outcome_of(lambda: group.all_reduce(torch.ones(3)).wait())
        raise RuntimeError(f"{raised.type}: {raised.message}")


def test_a_killed_peer_is_an_error(on_ranks):
    with pytest.raises(RanksFailed, match="PeerLostError"):
        on_ranks(2, killed_peer, group=False)


def unwrapped():
    with torch_group("unisono") as world:
        group = _C.from_torch(world)
        t = torch.ones(3) * (group.rank() + 1)
        group.all_reduce(t).wait()
        return group.name, t.tolist()


def test_our_own_backend_is_taken_apart_again(on_ranks):
    assert on_ranks(2, unwrapped, group=False) == [("shm", [3.0] * 3)] * 2


def train(kind):
    with torch_group("gloo"):
        rank = dist.get_rank()
        torch.manual_seed(3 + rank)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        wrap = unisono.DistributedDataParallel if kind == "unisono" else nn.parallel.DistributedDataParallel
        ddp = wrap(model, bucket_cap_mb=0.0005, process_group=dist.group.WORLD)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * rank + step))
            optimizer.zero_grad()
            ddp(x).square().sum().backward()
            optimizer.step()
        del ddp  # while the group lives: a stock Reducer that outlives it can hang in Gloo's destructor, holding Python's lock
        return [p.detach().clone() for p in model.parameters()]


def last_reference_in_a_callback():
    let_go, gone = threading.Event(), threading.Event()

    def callback(_):
        let_go.wait()
        holder.clear()
        gone.set()

    with torch_group("gloo"):
        holder = [dist.new_group()]
        resolve(holder[0]).barrier().wait()
        attached = dist.new_group()
        if dist.get_rank() == 1:  # comes when rank 0's callback is there, so that it runs on Gloo's thread
            dist.barrier(attached)
        work = dist.all_reduce(torch.ones(3), group=holder[0], async_op=True)
        if dist.get_rank() == 1:
            work.wait()
            return True
        future = work.get_future().then(callback)
        dist.barrier(attached)
        del work
    let_go.set()
    assert gone.wait(20)
    return future.done()


def test_the_last_reference_to_a_group_may_be_a_callbacks(on_ranks):
    assert on_ranks(2, last_reference_in_a_callback, group=False) == [True, True]


def test_our_wrapper_over_gloo_equals_stock(on_ranks):
    ours, theirs = on_ranks(2, train, "unisono", group=False), on_ranks(2, train, "stock", group=False)
    for a, b, c in zip(ours[0], ours[1], theirs[0], strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def ordered_sums():
    generator = torch.Generator().manual_seed(7 + int(os.environ["RANK"]))
    numbers = [torch.randn(n, generator=generator, dtype=dtype) for n in (1, 1003, 300_000) for dtype in (torch.float32, torch.float64)]
    out = []
    for backend in ("gloo", "unisono"):
        with torch_group(backend):
            group = unisono.ordered() if backend == "gloo" else resolve(None)
            sums = [t.clone() for t in numbers]
            for work in [group.all_reduce(t, "avg") for t in sums]:
                work.wait()
            out.append((group.name, sums))
    return out


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ordered_sums_over_gloo_have_the_bits_of_shared_memory(on_ranks, size):
    for (name, over_gloo), (shm, in_memory) in on_ranks(size, ordered_sums, group=False):
        assert name == "ordered/c10d/gloo" and shm == "shm"
        assert all(torch.equal(a, b) for a, b in zip(over_gloo, in_memory, strict=True))


def names_behind(backends):
    names = []
    for backend in backends:
        with torch_group(backend) as world:
            names.append(_C.from_torch(world).name)
    return names


def test_a_group_that_is_ours_alone_is_taken_apart(on_ranks):
    for names in on_ranks(2, names_behind, ["unisono", "cpu:unisono", "cpu:unisono,cuda:gloo"], group=False):
        assert names == ["shm", "shm", "c10d/unisono"]  # beside a backend for CUDA ours serves the CPU alone
