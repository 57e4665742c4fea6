"""send, recv, blocks of different sizes, split groups and what else stock programs call, on init_process_group("unisono")."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, outcome_of
from torch_group import torch_group

DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn]


def numbers(n, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 5, (n,), generator=generator).to(dtype)


def ring(dtype, n):
    with torch_group("unisono"):
        rank, size = dist.get_rank(), dist.get_world_size()
        got = torch.zeros(n, dtype=dtype)
        first, second = ((dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send))
        for call in (first, second):
            call(numbers(n, rank, dtype), (rank + 1) % size) if call is dist.send else call(got, (rank - 1) % size)
        strided = torch.zeros(n, 2, dtype=dtype)
        ops = [dist.P2POp(dist.isend, numbers(2 * n, rank, dtype).view(2, n).t(), (rank + 1) % size),
               dist.P2POp(dist.irecv, strided, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return got, strided


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 300_000])
def test_messages_around_a_ring(on_ranks, dtype, n):
    for rank, (got, strided) in enumerate(on_ranks(3, ring, dtype, n, group=False)):
        left = (rank - 1) % 3
        assert torch.equal(got.view(torch.uint8), numbers(n, left, dtype).view(torch.uint8))
        assert torch.equal(strided.contiguous().view(torch.uint8),
                           numbers(2 * n, left, dtype).view(2, n).t().contiguous().view(torch.uint8))


def from_anybody():
    with torch_group("unisono"):
        if dist.get_rank():
            dist.send(torch.full((3,), float(dist.get_rank())), 0, tag=9)
            dist.send_object_list([{"rank": dist.get_rank()}], 0)
            return None
        seen = {}
        for _ in range(dist.get_world_size() - 1):
            t = torch.zeros(3)
            source = dist.recv(t, tag=9)
            seen[source] = t[0].item()
        told = []
        for source in (2, 1):
            objects = [None]
            dist.recv_object_list(objects, source)
            told += objects
        return seen, told


def test_from_any_source(on_ranks):
    assert on_ranks(3, from_anybody, group=False)[0] == ({1: 1.0, 2: 2.0}, [{"rank": 2}, {"rank": 1}])


def tagged():
    with torch_group("unisono"):
        tensors = [torch.full((4,), float(i)) for i in range(4)]
        if dist.get_rank() == 0:
            for work in [dist.isend(t, 1, tag=i) for i, t in enumerate(tensors)]:
                work.wait()
            return None
        got = {}
        for tag in (2, 0, 3, 1):
            t = torch.zeros(4)
            dist.recv(t, 0, tag=tag)
            got[tag] = t[0].item()
        return got


def test_tags(on_ranks):
    assert on_ranks(2, tagged, group=False)[1] == {i: float(i) for i in range(4)}


def unequal(backend, dtype):
    with torch_group(backend):
        rank, size = dist.get_rank(), dist.get_world_size()
        sends = [(rank + 2 * r) % 4 for r in range(size)]  # rows from `rank` to r; some are 0
        takes = [(r + 2 * rank) % 4 for r in range(size)]
        out = torch.zeros(sum(takes), 5, dtype=dtype)
        dist.all_to_all_single(out, numbers(5 * sum(sends), rank, dtype).view(-1, 5), takes, sends)
        pieces = list(numbers(5 * sum(sends), rank, dtype).split([5 * n for n in sends]))
        parts = [torch.zeros(5 * n, dtype=dtype) for n in takes]
        work = dist.all_to_all(parts, pieces, async_op=True) if backend == "unisono" else None
        if work:
            work.get_future().wait()
        return out, torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_blocks_of_different_sizes(on_ranks, dtype):
    ours = on_ranks(3, unequal, "unisono", dtype, group=False)
    theirs = on_ranks(3, unequal, "gloo", dtype, group=False)
    for (single, listed), (expected, _) in zip(ours, theirs, strict=True):
        assert torch.equal(single, expected) and torch.equal(listed, expected.flatten())


def wrong_blocks():
    with torch_group("unisono"):
        rank = dist.get_rank()
        sums = outcome_of(lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 2], [2, 2]))
        inputs, sends = (torch.zeros(3), [1, 2]) if rank == 0 else (torch.zeros(2), [1, 1])
        differ = outcome_of(lambda: dist.all_to_all_single(torch.zeros(2), inputs, [1, 1], sends))
        return sums, differ, outcome_of(dist.barrier)


def test_wrong_blocks_are_named(on_ranks):
    results = on_ranks(2, wrong_blocks, group=False)
    for sums, _, later in results:
        assert sums.type == "InvalidArgumentError" and "4 rows" in sums.message and "add up to 3" in sums.message
        assert later.type == "MismatchError", later
    assert "receive of 1 f32 from rank 0" in results[1][1].message and "rank 0 sent 2 f32" in results[1][1].message


def premultiplied():
    with torch_group("unisono"):
        op = dist._make_nccl_premul_sum(0.25)
        t = torch.full((4,), dist.get_rank() + 1.0)
        dist.all_reduce(t, op=op)
        whole, part = torch.arange(4.0), torch.zeros(2)
        dist.reduce_scatter_tensor(part, whole, op=dist._make_nccl_premul_sum(torch.tensor([0.5])))
        return t.tolist(), part.tolist(), whole.tolist()


def test_premultiplied_sums(on_ranks):
    results = on_ranks(2, premultiplied, group=False)
    assert results == [([0.75] * 4, [0.0, 1.0], [0, 1, 2, 3]), ([0.75] * 4, [2.0, 3.0], [0, 1, 2, 3])]


def split():
    with torch_group("unisono") as world:
        rank = dist.get_rank()
        backend = world._get_backend(torch.device("cpu"))
        assert backend.supports_splitting
        pair = world.split_group([0, 2] if rank != 1 else [1], timeout=timedelta(seconds=20), group_name=f"pair {rank % 2}")
        t = torch.tensor([float(rank)])
        work = pair.allreduce([t])
        work.wait()
        return pair.rank(), pair.size(), t.item()


def test_split_groups(on_ranks):
    assert on_ranks(3, split, group=False) == [(0, 2, 2.0), (0, 1, 1.0), (1, 2, 2.0)]


def monitored():
    with torch_group("unisono", timeout=1) as world:  # dist.monitored_barrier itself lets Gloo alone through
        world.monitored_barrier(timedelta(seconds=20))
        if dist.get_rank() == 0:
            return outcome_of(lambda: world.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True))
        return outcome_of(lambda: dist.recv(torch.zeros(1), 0))  # busy with something else until the group ends


def test_monitored_barrier_names_all_who_are_missing(on_ranks):
    for outcome in on_ranks(3, monitored, group=False):
        assert "rank 1, pid" in outcome.message and "rank 2, pid" in outcome.message or "no such message" in outcome.message


def late(seconds):
    with torch_group("unisono", timeout=seconds):
        if dist.get_rank() == 0:
            return outcome_of(lambda: dist.recv(torch.zeros(3), 1, tag=5))
        return outcome_of(lambda: dist.recv(torch.zeros(3), 0, tag=6))


def test_a_message_that_never_comes_is_named(on_ranks):
    for outcome in on_ranks(2, late, 1, group=False):
        assert "no such message came within" in outcome.message, outcome


def killed():
    with torch_group("unisono"):
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        raised = outcome_of(lambda: dist.recv(torch.ones(3)) if dist.get_rank() == 2 else dist.recv(torch.ones(3), 1))
        raise RuntimeError(f"{raised.type} after {time.monotonic() - begin:.0f} s: {raised.message}")


def test_a_killed_sender_is_named(on_ranks):
    with pytest.raises(RanksFailed) as failure:
        on_ranks(3, killed, group=False)
    text = str(failure.value)
    assert text.count("PeerLostError after 0 s") == 2 and "rank 1, pid" in text, text


def coalesced():
    with torch_group("unisono"):
        rank = dist.get_rank()
        inputs = [torch.full((2,), rank + 1.0), torch.full((3,), rank + 10.0)]
        outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(2)]
        dist.all_gather_coalesced(outputs, inputs)
        sums = [torch.full((2,), rank + 1.0), torch.full((3,), rank + 10.0)]
        dist.all_reduce_coalesced(sums)
        return [[t[0].item() for t in one] for one in outputs], [t[0].item() for t in sums]


def test_coalesced(on_ranks):
    for gathered, sums in on_ranks(2, coalesced, group=False):
        assert gathered == [[1.0, 10.0], [2.0, 11.0]] and sums == [3.0, 21.0]


def different_sizes():
    with torch_group("unisono"):
        rank, size = dist.get_rank(), dist.get_world_size()
        outputs = [torch.zeros(r + 1) for r in range(size)]
        dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
        own = torch.zeros(rank + 1)
        dist.reduce_scatter(own, [torch.full((r + 1,), float(rank + r)) for r in range(size)])
        return [t.tolist() for t in outputs], own.tolist()


def test_lists_of_different_sizes(on_ranks):
    for rank, (gathered, own) in enumerate(on_ranks(3, different_sizes, group=False)):
        assert gathered == [[0.0], [1.0] * 2, [2.0] * 3] and own == [3.0 + 3 * rank] * (rank + 1)


def profiled():
    with torch_group("unisono"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(torch.ones(3))
            dist.barrier()
        return [event.name for event in profile.events() if "unisono" in event.name]


def test_profiles_show_the_calls(on_ranks):
    assert on_ranks(2, profiled, group=False) == [["unisono:all_reduce"]] * 2


def unequal_blocks(dtypes):
    """Rank r gives r + 1 rows of 3 to everybody, between hosts of one rank each."""
    os.environ["UNISONO_HOST_PART"] = os.environ["RANK"]
    found = {}
    with torch_group("unisono"):
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = [rank + 1] * size, list(range(1, size + 1))
        for dtype in dtypes:
            mine = torch.arange(3 * size * (rank + 1)).add(10 * rank).view(-1, 3).to(dtype)
            out = torch.empty(sum(rows[1]), 3, dtype=dtype)
            dist.all_to_all_single(out, mine, rows[1], rows[0])
            strided = torch.empty(3, sum(rows[1]), dtype=dtype).t()
            dist.all_to_all_single(strided, mine.t().contiguous().t(), rows[1], rows[0])
            parts = [torch.empty(n, 3, dtype=dtype) for n in rows[1]]
            dist.all_to_all(parts, list(mine.split(rows[0])))
            parts = torch.cat([part.to(torch.complex64) for part in parts])
            found[str(dtype)] = [t.to(torch.complex64).real.tolist() for t in (out, strided, parts)]
    return found


def test_unequal_blocks_of_any_dtype_between_hosts(on_ranks):
    dtypes = [torch.float32, torch.int16, torch.uint16, torch.bool, torch.float8_e5m2, torch.bfloat16, torch.complex64, torch.int64]
    for rank, found in enumerate(on_ranks(3, unequal_blocks, dtypes, group=False)):
        for dtype in dtypes:
            blocks = []
            for sender in range(3):
                sent = torch.arange(3 * 3 * (sender + 1)).add(10 * sender).view(-1, 3).to(dtype).to(torch.complex64).real
                blocks.append(sent.split(sender + 1)[rank])
            assert found[str(dtype)] == [torch.cat(blocks).tolist()] * 3, dtype


def splits_on_one_rank(_=None):
    with torch_group("unisono", timeout=3):
        rank, t = dist.get_rank(), torch.ones(4)
        splits = ([2, 2], [2, 2]) if rank == 0 else ()
        return outcome_of(lambda: dist.all_to_all_single(torch.zeros(4), t, *splits))


def test_split_sizes_on_one_rank_only_are_named(on_ranks):
    """By the collective that one of them waits in, or by the message that the other waits for, whichever is due first."""
    for outcome in on_ranks(2, splits_on_one_rank, group=False):
        assert "all_to_all" in outcome.message and "rank 0" in outcome.message, outcome.message


def in_a_world_of_one():
    with torch_group("unisono"):
        out, blocks = torch.zeros(3), [torch.zeros(2)]
        dist.all_to_all_single(out, torch.arange(3.0), [3], [3])
        dist.all_to_all(blocks, [torch.ones(2)])
        return out.tolist(), blocks[0].tolist()


def test_all_to_all_in_a_world_of_one(on_ranks):
    assert on_ranks(1, in_a_world_of_one, group=False) == [([0.0, 1.0, 2.0], [1.0, 1.0])]


def wrong_size_put_aside():
    """The message has come, and waits behind another, when a receive of another size is made."""
    with torch_group("unisono") as world:
        if world.rank() == 0:
            dist.send(torch.ones(2), 1, tag=1)
            dist.send(torch.ones(1), 1, tag=2)
            return outcome_of(lambda: dist.recv(torch.zeros(1), 1, tag=3))
        dist.recv(torch.zeros(1), 0, tag=2)
        return outcome_of(lambda: dist.recv(torch.zeros(3), 0, tag=1))


def test_a_receive_of_another_size_than_what_was_put_aside(on_ranks):
    for raised in on_ranks(2, wrong_size_put_aside, group=False):
        assert "receive of 3 f32 from rank 0, tag 1: rank 0 sent 2 f32" in raised.message
