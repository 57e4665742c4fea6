"""Groups of two levels: ranks that share a host, Gloo between hosts. UNISONO_HOST_PART makes hosts of one machine's ranks."""

import os

import pytest
import torch
from ranks import outcome_of
from torch import nn
from torch_group import torch_group

import unisono
from unisono import DistributedDataParallel


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
    ("aabb", [(0, 1), (2, 3)], "hierarchy/c10d/gloo"), ("abab", [(0, 2), (1, 3)], "hierarchy/c10d/gloo"),
    ("aaab", [(0, 1, 2), (3,)], "hierarchy/c10d/gloo"), ("aaaa", [(0, 1, 2, 3)], "shm"), ("abcd", [(0,), (1,), (2,), (3,)], "c10d/gloo")])
def test_means_whatever_the_hosts(on_ranks, part, hosts, name):
    for seen, own_name, size, right, half in on_ranks(4, means, part, group=False):
        assert [tuple(ranks) for ranks in seen] == hosts
        assert own_name.startswith(name.split("/gloo")[0])
        assert size == 4
        assert right == [True] * 4
        assert half == [10.0]


def train(part):
    place(part)
    with torch_group("gloo") as world:
        group = unisono.hierarchical(world)
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 3)), process_group=group, bucket_cap_mb=0.004)
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
