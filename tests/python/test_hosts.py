"""Groups of two levels: ranks that share a host, Gloo between hosts. UNISONO_HOST_PART makes hosts of one machine's ranks."""

import gc
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import unisono
from ranks import outcome_of
from torch import nn
from torch_group import torch_group
from unisono import _C, DistributedDataParallel
from unisono.several_hosts import meet


def place(part):
    os.environ["UNISONO_HOST_PART"] = part[int(os.environ["RANK"])]


def means(part):
    place(part)
    with torch_group("gloo") as world:
        hosts, group, r = unisono.hosts_of(world), unisono.hierarchical(world), int(os.environ["RANK"])
        out = []
        for count in (1, 3, 1000, 3_000_001):
            x = torch.arange(count, dtype=torch.float32) % 7 + r
            group.all_reduce(x, "avg").wait()
            out.append(torch.equal(x, torch.arange(count, dtype=torch.float32) % 7 + (len(part) - 1) / 2))
        half = torch.full((50_000,), r + 1.0, dtype=torch.bfloat16)
        group.all_reduce(half, "sum", may_round=True).wait()
        return hosts, group.name, group.size(), out, half.unique().tolist()


@pytest.mark.parametrize(("part", "hosts", "name"), [
    ("aabb", [(0, 1), (2, 3)], "hierarchy/c10d/gloo"), ("abba", [(0, 3), (1, 2)], "hierarchy/c10d/gloo"),
    ("abab", [(0, 2), (1, 3)], "hierarchy/c10d/gloo"),
    ("aaab", [(0, 1, 2), (3,)], "hierarchy/c10d/gloo"), ("aaaa", [(0, 1, 2, 3)], "shm"), ("abcd", [(0,), (1,), (2,), (3,)], "c10d/gloo")])
def test_means_whatever_the_hosts(on_ranks, part, hosts, name):
    for seen, own_name, size, right, half in on_ranks(4, means, part, group=False):
        assert [tuple(ranks) for ranks in seen] == hosts
        assert own_name.startswith(name.split("/gloo")[0])
        assert size == 4
        assert right == [True] * 4
        assert half == [10.0]


def moves(part):
    place(part)
    with torch_group("gloo") as world:
        group = unisono.hierarchical(world)
        rank, out = group.rank(), []
        for root in range(4):
            x = torch.arange(100_003.0) + (1000 * root if rank == root else -1)
            group.broadcast(x, root).wait()
            out.append(torch.equal(x, torch.arange(100_003.0) + 1000 * root))
        everything = torch.zeros(4, 50_001)
        group.all_gather(everything, torch.full((50_001,), rank + 0.5)).wait()
        out.append(torch.equal(everything, torch.arange(4.0)[:, None].expand(4, 50_001) + 0.5))
        return out


@pytest.mark.parametrize("part", ["aabb", "abba", "aaab", "abbb"])
def test_blocks_go_to_their_places_whatever_the_hosts(on_ranks, part):
    for right in on_ranks(4, moves, part, group=False):
        assert right == [True] * 5


def threads_of_many(part):
    place(part)
    with torch_group("gloo") as world:
        counts = []
        for _ in range(4):
            group = unisono.hierarchical(world)
            group.barrier().wait()
            del group
            gc.collect()
            counts.append(len(os.listdir("/proc/self/task")))
        return counts


def test_groups_that_go_leave_no_threads(on_ranks):
    for counts in on_ranks(3, threads_of_many, "aab", group=False):
        assert counts[-1] <= counts[0] + 1, counts  # one may be just ending


def a_blank_in_the_name(part):
    os.environ["UNISONO_HOST_PART"] = f"rack {part[int(os.environ['RANK'])]} left"
    with torch_group("gloo") as world:
        return unisono.hosts_of(world)


def test_a_part_may_have_blanks_in_its_name(on_ranks):
    for hosts in on_ranks(3, a_blank_in_the_name, "aab", group=False):
        assert hosts == [(0, 1), (2,)]


def train(part):
    place(part)
    with torch_group("gloo") as world:
        group = unisono.hierarchical(world)
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 3)), process_group=group,
                                      bucket_cap_mb=0.004)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(1 + int(os.environ["RANK"]))
        for batch in torch.randn(8, 5, 30):
            optimizer.zero_grad()
            ddp(batch).pow(2).mean().backward()
            optimizer.step()
        return ddp.digest()


def test_two_hosts_of_two_train_as_one_of_four(on_ranks):
    """Sums of neighbours, then of pairs: the same balanced tree, whoever makes it."""
    digests = {digest for part in ("aaaa", "aabb") for digest in on_ranks(4, train, part, group=False)}
    assert len(digests) == 1


def a_peer_leaves(part):
    place(part)
    with torch_group("gloo", timeout=5) as world:
        group = unisono.hierarchical(world, timeout=5)
        group.barrier().wait()
        if int(os.environ["RANK"]) == 3:
            return None
        return outcome_of(lambda: group.all_reduce(torch.ones(100_000), "sum").wait())


def test_a_rank_that_leaves_is_an_error_on_all_others(on_ranks):
    *others, left = on_ranks(4, a_peer_leaves, "aabb", group=False)
    assert left is None
    for raised in others:
        assert raised.type in ("PeerLostError", "TimeoutError") and "all_reduce" in raised.message


def stock_program(part, backend):
    """Collectives, messages, blocks of different sizes and sub-groups, as torch.distributed has them."""
    place(part)
    with torch_group(backend):
        rank, size = dist.get_rank(), dist.get_world_size()
        total = torch.arange(1000.0) + rank
        dist.all_reduce(total)
        told = torch.full((3,), float(rank))
        dist.broadcast(told, src=2)
        everything = torch.zeros(size * 2)
        dist.all_gather_into_tensor(everything, torch.tensor([rank, -rank], dtype=torch.float32))
        share = torch.zeros(5)
        dist.reduce_scatter_tensor(share, torch.arange(5.0 * size) + rank)
        swapped = torch.zeros(size)
        dist.all_to_all_single(swapped, torch.arange(float(size)) + 10 * rank)
        sends, takes = [(rank + r) % 3 for r in range(size)], [(r + rank) % 3 for r in range(size)]
        blocks = torch.zeros(sum(takes))
        dist.all_to_all_single(blocks, torch.full((sum(sends),), float(rank)), takes, sends)
        pieces = [torch.zeros(n) for n in takes]
        if backend == "unisono":  # Gloo has none of lists
            dist.all_to_all(pieces, [torch.full((n,), float(rank)) for n in sends])
            assert torch.equal(torch.cat(pieces), blocks)
        came = torch.zeros(4)
        works = [dist.isend(torch.full((4,), float(rank)), (rank + 1) % size), dist.irecv(came, (rank - 1) % size)]
        for work in works:
            work.wait()
        pair = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
        of_two = torch.tensor([rank + 1.0])
        dist.all_reduce(of_two, group=pair)
        objects = [None] * size
        dist.all_gather_object(objects, f"rank {rank}")
        dist.barrier()
        return [total, told, everything, share, swapped, blocks, came, of_two], objects


@pytest.mark.parametrize("part", ["aaaa", "aabb", "aaab", "abcd"])
def test_stock_programs_run_on_several_hosts(on_ranks, part):
    ours = on_ranks(4, stock_program, part, "unisono", group=False)
    theirs = on_ranks(4, stock_program, part, "gloo", group=False)
    for (mine, objects), (expected, names) in zip(ours, theirs, strict=True):
        assert objects == names
        for a, b in zip(mine, expected, strict=True):
            assert torch.equal(a, b)  # whole numbers: their sums have no order


def missing_rank(part):
    place(part)
    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.environ["UNISONO_STORE"].removeprefix("file:"), 3)
    return None if rank == 2 else outcome_of(lambda: meet(store, rank, 3, timedelta(seconds=30), timedelta(seconds=1)))


def test_a_rank_that_is_missing_at_the_start_is_named(on_ranks):
    first, second, _ = on_ranks(3, missing_rank, "aab", group=False)
    for raised in (first, second):
        assert raised.type == "TimeoutError" and "missing rank 2" in raised.message, raised


def leave_the_start(world, part, after):
    """Rank 2 goes once the ranks have met (after "join"), told each other their hosts ("hosts")."""
    place(part)
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # several hosts, says the launcher
    world.barrier().wait()
    if world.rank() < 2:
        begin = time.monotonic()
        return outcome_of(lambda: unisono.init(timeout=40, start_timeout=4)), time.monotonic() - begin
    store, rank, size = _C.meet_over_hosts("auto", -1, -1, timedelta(seconds=30), None, "unisono")

    def exchange(what, text):
        keys = [f"first/unisono/{what}/{r}" for r in range(size)]
        store.set(keys[rank], text)
        return [store.get(key).decode() for key in keys]

    if after == "hosts":
        _C.find_hosts(exchange)
    return None


@pytest.mark.parametrize(("part", "after", "words"), [
    ("aab", "join", ["missing rank 2"]), ("aaa", "hosts", ["missing rank 2"]),
    ("aab", "hosts", ["Gloo did not start between ranks 0, 1, 2: ", "imeout", "GLOO_SOCKET_IFNAME"])])
def test_a_start_that_one_rank_leaves_ends_by_the_deadline_of_the_start(on_ranks, part, after, words):
    *others, _ = on_ranks(3, leave_the_start, part, after)
    for raised, seconds in others:
        assert raised.type == "TimeoutError" and "Error" in raised.bases, raised
        assert all(word in raised.message for word in words), raised
        assert seconds < 20  # of `timeout` 40


def two_deadlines(part, transport):
    place(part)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    group = unisono.init(transport, timeout=7, start_timeout=60)
    group.barrier().wait()
    return group.timeout, group.name


@pytest.mark.parametrize(("part", "transport", "name"), [("aab", "auto", "hierarchy"), ("aaa", "auto", "shm"), ("abc", "auto", "c10d"),
                                                         ("aaa", "gloo", "c10d")])
def test_calls_have_a_deadline_of_their_own(on_ranks, part, transport, name):
    for timeout, made in on_ranks(3, two_deadlines, part, transport, group=False):
        assert timeout == 7 and made.startswith(name)


def no_interface(part):
    place(part)
    os.environ.update(LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="nowhere7")
    return outcome_of(lambda: unisono.init(timeout=10, start_timeout=10))


def test_an_interface_that_is_not_there_is_named(on_ranks):
    for raised in on_ranks(2, no_interface, "ab", group=False):
        assert raised.type == "InvalidArgumentError" and "GLOO_SOCKET_IFNAME=nowhere7" in raised.message, raised


def groups_of_parts(make, part, parts):
    place(part)
    with torch_group("gloo"):
        rank = dist.get_rank()
        groups = [dist.new_group(ranks) for ranks in parts]
        dist.new_group([0, 2])  # from here on some ranks have more groups than others
        own = next(place for place, ranks in enumerate(parts) if rank in ranks)
        group = getattr(unisono, make)(groups[own])
        x = torch.full((100_000,), rank + 1.0)
        group.all_reduce(x, "sum").wait()
        again = getattr(unisono, make)(groups[own])
        again.barrier().wait()
        return group.name, x.unique().tolist(), [sum(r + 1.0 for r in parts[own])]


@pytest.mark.parametrize(("make", "part", "parts", "names"), [
    ("ordered", "aaaa", [[0, 1], [2, 3]], ["ordered/c10d"] * 4), ("ordered", "abab", [[0, 1], [2, 3]], ["ordered/c10d"] * 4),
    ("hierarchical", "abcd", [[0, 1], [2, 3]], ["c10d"] * 4), ("hierarchical", "aabb", [[0, 1], [2, 3]], ["shm"] * 4),
    ("hierarchical", "aabb", [[0, 1, 3], [2]], ["hierarchy", "hierarchy", "serial", "hierarchy"])])
def test_members_alone_make_groups_of_sub_groups(on_ranks, make, part, parts, names):
    for name, (seen, total, expected) in zip(names, on_ranks(4, groups_of_parts, make, part, parts, group=False), strict=True):
        assert seen.startswith(name)
        assert total == expected


def deadlines_of_torch_groups(part):
    place(part)
    with torch_group("gloo", timeout=40) as world:
        pair = dist.new_group(backend="cpu:gloo", timeout=timedelta(seconds=6))
        return [group.timeout for group in (unisono.hierarchical(world, timeout=7), unisono.ordered(world, timeout=8),
                                            unisono.group.resolve(pair), unisono.group.resolve(world))]


@pytest.mark.parametrize("part", ["aab", "aaa"])
def test_groups_have_the_deadline_they_were_given(on_ranks, part):
    assert on_ranks(3, deadlines_of_torch_groups, part, group=False) == [[7.0, 8.0, 6.0, 40.0]] * 3
