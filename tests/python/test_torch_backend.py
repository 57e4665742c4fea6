"""Stock torch.distributed programs on init_process_group("unisono"): the same results as on Gloo."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, outcome_of
from torch import nn
from torch_group import torch_group

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8, torch.float16, torch.bfloat16,
          torch.bool, torch.complex64]


def values(rank, n, dtype):
    """Small whole numbers: sums are exact in every dtype, so that the order of summation does not show."""
    generator = torch.Generator().manual_seed(100 + rank)
    out = torch.randint(0, 2 if dtype == torch.bool else 5, (n,), generator=generator)
    return out.to(dtype)


def all_collectives(backend, dtype, n):
    results = {}
    with torch_group(backend):
        rank, size = dist.get_rank(), dist.get_world_size()
        t = values(rank, n, dtype)
        dist.all_reduce(t)
        results["all_reduce"] = t
        t = values(rank, n, dtype)
        dist.broadcast(t, src=size - 1)
        results["broadcast"] = t
        parts = [torch.zeros(n, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, values(rank, n, dtype))
        results["all_gather"] = torch.stack(parts)
        flat = torch.zeros(n * size, dtype=dtype)
        dist.all_gather_into_tensor(flat, values(rank, n, dtype))
        results["all_gather_into_tensor"] = flat
        t = torch.zeros(n, dtype=dtype)
        dist.reduce_scatter(t, [values(rank + 10 * r, n, dtype) for r in range(size)])
        results["reduce_scatter"] = t
        t = values(rank, n, dtype)
        dist.reduce(t, dst=1)
        results["reduce"] = t if rank == 1 else None
        parts = [torch.zeros(n, dtype=dtype) for _ in range(size)] if rank == 1 else None
        dist.gather(values(rank, n, dtype), parts, dst=1)
        results["gather"] = torch.stack(parts) if rank == 1 else None
        t = torch.zeros(n, dtype=dtype)
        dist.scatter(t, [values(r, n, dtype) for r in range(size)] if rank == 0 else None, src=0)
        results["scatter"] = t
        t = torch.zeros(n * size, dtype=dtype)
        dist.all_to_all_single(t, values(rank, n * size, dtype))
        results["all_to_all_single"] = t
        dist.barrier()
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 1000])
def test_collectives_equal_gloo(on_ranks, dtype, n):
    def expected_of(collective, theirs, rank):
        if dtype == torch.bool and collective in ("all_reduce", "reduce", "reduce_scatter"):
            return None  # checked below: what Gloo's sum of bool is differs between torch releases
        return theirs[rank].get(collective)

    ours = on_ranks(2, all_collectives, "unisono", dtype, n, group=False)
    # Gloo gathers no complex numbers; the values are real, so real ones of the same size stand in for them.
    known = torch.float32 if dtype == torch.complex64 else dtype
    theirs = on_ranks(2, all_collectives, "gloo", known, n, group=False)
    for rank in range(2):
        for collective, result in ours[rank].items():
            expected = expected_of(collective, theirs, rank)
            if expected is not None:
                assert torch.equal(result, expected.to(dtype)), (collective, rank)
    if dtype == torch.bool:
        assert torch.equal(ours[0]["all_reduce"], values(0, n, dtype) | values(1, n, dtype))
        assert torch.equal(ours[1]["reduce"], ours[0]["all_reduce"])


def reduce_with(name, dtype, shape):
    with torch_group("unisono"):
        t = (values(dist.get_rank(), 6, dtype) + 1).view(shape)
        dist.all_reduce(t, op=getattr(dist.ReduceOp, name))
        return t.clone()


@pytest.mark.parametrize("name, combine", [
    ("SUM", lambda a, b: a + b), ("AVG", lambda a, b: (a + b) / 2), ("PRODUCT", lambda a, b: a * b),
    ("MIN", torch.minimum), ("MAX", torch.maximum)])
def test_reduce_ops(on_ranks, name, combine):
    first, second = on_ranks(2, reduce_with, name, torch.float32, (2, 3), group=False)
    a, b = (values(rank, 6, torch.float32) + 1 for rank in range(2))
    assert torch.equal(first, combine(a, b).view(2, 3))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name, combine", [("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or), ("BXOR", torch.bitwise_xor)])
def test_bitwise_ops(on_ranks, name, combine):
    first, _ = on_ranks(2, reduce_with, name, torch.int32, (6,), group=False)
    assert torch.equal(first, combine(*(values(rank, 6, torch.int32) + 1 for rank in range(2))))


def strided():
    with torch_group("unisono"):
        rank, size = dist.get_rank(), dist.get_world_size()
        base = torch.arange(12.0).view(3, 4) + rank
        dist.all_reduce(base.t())
        column = torch.zeros(4, 2)
        dist.broadcast(column[:, 1], src=0) if rank else dist.broadcast(torch.arange(4.0), src=0)
        parts = [torch.zeros(4, 3).t() for _ in range(size)]
        dist.all_gather(parts, torch.full((4, 3), rank + 1.0).t())
        return base, column, parts


def test_strided_tensors(on_ranks):
    for rank, (base, column, parts) in enumerate(on_ranks(2, strided, group=False)):
        assert torch.equal(base, 2 * torch.arange(12.0).view(3, 4) + 1)
        if rank == 1:
            assert torch.equal(column, torch.stack([torch.zeros(4), torch.arange(4.0)], 1))
        assert torch.equal(torch.stack(parts), torch.stack([torch.full((3, 4), 1.0), torch.full((3, 4), 2.0)]))


def asynchronous():
    with torch_group("unisono"):
        rank = dist.get_rank()
        tensors = [torch.full((1000,), float(rank + i)) for i in range(5)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        for work in reversed(works):
            assert work.wait()
            assert work.is_completed() and work.is_success()
        polled = torch.full((3,), float(rank))
        work = dist.all_reduce(polled, async_op=True)
        while not work.is_completed():
            pass
        futures = [torch.full((1000,), float(rank + i)) for i in range(5)]
        seen = [dist.all_reduce(t, async_op=True).get_future().then(lambda f: f.value()[0].sum().item()) for t in futures]
        assert dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=20))
        return [t[0].item() for t in tensors], polled[0].item(), [f.wait() for f in seen]


def test_asynchronous_calls_and_futures(on_ranks):
    for tensors, polled, sums in on_ranks(2, asynchronous, group=False):
        assert tensors == [2.0 * i + 1 for i in range(5)]
        assert polled == 1.0
        assert sums == [1000 * (2.0 * i + 1) for i in range(5)]


def subgroups():
    with torch_group("unisono"):
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, group=pairs[rank % 2])
        again = dist.new_group([0, 1, 2, 3])
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=again)
        return t.item(), total.item(), dist.get_backend(again)


def test_new_group(on_ranks):
    results = on_ranks(4, subgroups, group=False)
    assert [r[0] for r in results] == [2.0, 4.0, 2.0, 4.0]
    assert all(r[1:] == (6.0, "unisono") for r in results)


def train_stock_ddp(backend):
    with torch_group(backend):
        rank = dist.get_rank()
        torch.manual_seed(7 + rank)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1000 * rank + step))
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
        del ddp  # while the group lives: a stock Reducer that outlives it can hang in Gloo's destructor, holding Python's lock
        return [p.detach().clone() for p in model.parameters()]


def test_stock_ddp_trains_to_the_same_bits_as_on_gloo(on_ranks):
    ours = on_ranks(2, train_stock_ddp, "unisono", group=False)
    theirs = on_ranks(2, train_stock_ddp, "gloo", group=False)
    for a, b, c in zip(ours[0], ours[1], theirs[0], strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def objects():
    with torch_group("unisono"):
        rank = dist.get_rank()
        everybody = [None, None]
        dist.all_gather_object(everybody, {"rank": rank, "name": "x" * (10 + rank)})
        told = [f"from {rank}"]
        dist.broadcast_object_list(told, src=1)
        return everybody, told


def test_objects(on_ranks):
    for everybody, told in on_ranks(2, objects, group=False):
        assert everybody == [{"rank": 0, "name": "x" * 10}, {"rank": 1, "name": "x" * 11}]
        assert told == ["from 1"]


def mismatched(kind):
    with torch_group("unisono"):
        rank = dist.get_rank()
        if kind == "count":  # A1
            call = lambda: dist.all_reduce(torch.ones(2 + rank))  # noqa: E731
        elif kind == "large":
            call = lambda: dist.all_reduce(torch.ones(100_000 * (1 + rank)))  # noqa: E731
        elif kind == "dtype":  # A2
            call = lambda: dist.all_reduce(torch.ones(2, dtype=(torch.float32, torch.int32)[rank]))  # noqa: E731
        elif kind == "operation":
            call = lambda: (dist.all_reduce if rank else lambda t: dist.broadcast(t, 0))(torch.ones(2))  # noqa: E731
        else:
            call = lambda: dist.all_reduce(torch.ones(2), op=(dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank])  # noqa: E731
        begin = time.monotonic()
        return outcome_of(call), time.monotonic() - begin, outcome_of(lambda: dist.all_reduce(torch.ones(2)))


@pytest.mark.parametrize("kind, words", [("count", ["2", "3"]), ("large", ["100000", "200000"]), ("dtype", ["f32", "i32"]),
                                         ("operation", ["broadcast", "all_reduce"]), ("op", ["sum", "max"])])
def test_calls_that_differ(on_ranks, kind, words):
    for first, _, later in on_ranks(2, mismatched, kind, group=False):
        assert first.type == "MismatchError" and later.type == "MismatchError", (first, later)
        for word in words:
            assert word in first.message


def refusals():
    with torch_group("unisono"):
        t = torch.ones(4)
        return [outcome_of(call) for call in (
            lambda: dist.send(t, dist.get_rank()),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.int16)),
            lambda: dist.all_reduce(t.to_sparse(), op=dist.ReduceOp.MAX),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32), op=dist.ReduceOp.AVG),
            lambda: dist.all_to_all_single(t, torch.ones(4), [1, 2], [1, 3]),
            lambda: dist.all_reduce(t),
        )]


def test_what_is_not_there_is_named_and_breaks_nothing(on_ranks):
    for send, dtype, sparse, average, splits, good in on_ranks(2, refusals, group=False):
        assert "destination rank" in send.message
        assert "all_reduce" in dtype.message and "Short" in dtype.message
        assert sparse.type == "InvalidArgumentError" and "only SUM" in sparse.message
        assert average.type == "InvalidArgumentError" and "avg" in average.message
        assert "all_to_all" in splits.message
        assert good is None


def killed_peer():
    with torch_group("unisono"):
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        raised = outcome_of(lambda: dist.all_reduce(torch.ones(3)))
        raise RuntimeError(f"{raised.type} after {time.monotonic() - begin:.1f} s: {raised.message}")


def test_a_killed_peer_is_named(on_ranks):
    with pytest.raises(RanksFailed, match="PeerLostError"):
        on_ranks(2, killed_peer, group=False)


def with_a_secret(variable, values, part, timeout):
    rank = int(os.environ["RANK"])
    os.environ.update({variable: values[rank], "UNISONO_HOST_PART": part[rank]})

    def total():
        with torch_group("unisono", timeout):
            t = torch.ones(1)
            dist.all_reduce(t)
            return t.item()

    return outcome_of(total)


@pytest.mark.parametrize("part", ["aa", "ab"])
@pytest.mark.parametrize("variable", ["UNISONO_SECRET", "UNISONO_JOB"])
def test_ranks_with_another_secret_or_job_do_not_meet(on_ranks, variable, part):
    assert on_ranks(2, with_a_secret, variable, ("three", "three"), part, 30, group=False) == [2.0, 2.0]
    strangers = on_ranks(2, with_a_secret, variable, ("three", "four"), part, 3, group=False)
    for raised, missing in zip(strangers, (1, 0), strict=True):
        assert raised.type == "TimeoutError" and f"missing rank {missing}" in raised.message and variable in raised.message, raised
        assert "three" not in raised.message and "four" not in raised.message


def multiplied_by_a_third():
    with torch_group("unisono"):
        value = torch.ones(3, dtype=torch.float64)
        dist.all_reduce(value, op=dist._make_nccl_premul_sum(1 / 3))
        return value.tolist()


def test_a_factor_has_all_bits_of_a_double(on_ranks):
    assert on_ranks(2, multiplied_by_a_third, group=False) == [[2 / 3] * 3] * 2


def with_other_roots(call):
    with torch_group("unisono") as world:
        rank, x = world.rank(), torch.ones(2)
        blocks = [torch.zeros(2), torch.zeros(2)]
        return outcome_of({
            "reduce": lambda: dist.reduce(x, rank),
            "gather": lambda: dist.gather(x, blocks, dst=rank),
            "reduce and all_reduce": lambda: dist.reduce(x, 0) if rank else dist.all_reduce(x),
            "gather and all_gather": lambda: dist.gather(x, None, dst=0) if rank else dist.all_gather(blocks, x),
            "scatter and broadcast": lambda: dist.scatter(x, None, src=0) if rank else dist.broadcast(torch.ones(4), 0),
        }[call])


@pytest.mark.parametrize("call, sides", [
    ("reduce", ["reduce to rank 0", "reduce to rank 1"]), ("gather", ["gather to rank 0", "gather to rank 1"]),
    ("reduce and all_reduce", ["reduce to rank 0"]), ("gather and all_gather", ["gather to rank 0"]),
    ("scatter and broadcast", ["scatter"])])
def test_ranks_that_mean_other_operations(on_ranks, call, sides):
    for raised in on_ranks(2, with_other_roots, call, group=False):
        assert raised.type == "DistBackendError" or "MismatchError" in (raised.type, *raised.bases), raised
        assert all(side in raised.message for side in sides), raised.message


def gathered_in_another_layout():
    with torch_group("unisono") as world:
        mine = torch.arange(6.0).view(2, 3).t() if world.rank() == 0 else torch.arange(3.0)
        out = [torch.zeros(6), torch.zeros(3)]
        dist.all_gather(out, mine)
        return [t.tolist() for t in out]


def test_all_gather_of_a_strided_tensor_to_outputs_of_other_sizes(on_ranks):
    assert on_ranks(2, gathered_in_another_layout, group=False) == [[[0.0, 3.0, 1.0, 4.0, 2.0, 5.0], [0.0, 1.0, 2.0]]] * 2
