"""Ranks with different numbers of batches, from Python."""

import pytest
import torch
from ranks import outcome_of
from torch import nn

import unisono
from unisono import DistributedDataParallel


def steps(group, by_initial, weighted):
    net = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(net, process_group=group)
    seen = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for _ in range(3 if group.rank() == 0 else 1):
            ddp.zero_grad()
            loss = ddp(torch.ones(1, 4)).sum()
            (ddp.weight(loss, 1) if weighted else loss).backward()
            seen.append(net.weight.grad[0, 0].item())
    return seen, ddp.replicas_identical()


@pytest.mark.parametrize("by_initial, weighted, expected", [
    (True, False, [1, 0.5, 0.5]), (False, False, [1, 1, 1]), (True, True, [1, 1, 1])])
def test_both_divisors(on_ranks, by_initial, weighted, expected):
    assert on_ranks(2, steps, by_initial, weighted) == [(expected, True), (expected[:1], True)]


def trains_on(group, longest):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    ddp = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        with ddp.join():
            for _ in range(4 if group.rank() == longest else 2):
                optimizer.zero_grad()
                ddp(torch.randn(6, 4)).pow(2).mean().backward()
                optimizer.step()
    return ddp.replicas_identical(), net[1].num_batches_tracked.item()


@pytest.mark.parametrize("longest", [0, 1])
def test_all_end_with_the_state_of_the_last(on_ranks, longest):
    assert on_ranks(2, trains_on, longest) == [(True, 8)] * 2


def ends_early(group):
    net = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(net, process_group=group)

    def train():
        with ddp.join(throw_on_early_termination=True):
            for _ in range(1 + group.rank()):
                ddp.zero_grad()
                ddp(torch.ones(1, 4)).sum().backward()

    return outcome_of(train)


def test_throw_on_early_termination(on_ranks):
    for raised in on_ranks(2, ends_early):
        assert raised.type == "MismatchError" and "rank 0 has no more inputs in step 1" in raised.message


def body_raises(group):
    ddp = DistributedDataParallel(nn.Linear(4, 1), process_group=group)

    def train():
        with ddp.join():
            raise KeyError("mine")

    raised = outcome_of(train)
    with ddp.join(enable=False):
        pass
    with ddp.join():
        ddp(torch.ones(1, 4)).sum().backward()
    return raised.type


def test_an_exception_of_the_body_comes_through(on_ranks):
    assert on_ranks(2, body_raises) == ["KeyError"] * 2


def with_sync_batch_norm(group, throw):
    net = nn.Sequential(nn.Linear(4, 4), unisono.SyncBatchNorm(4, process_group=group))
    ddp = DistributedDataParallel(net, process_group=group)

    def train():
        with ddp.join(throw_on_early_termination=throw):
            for _ in range(2):
                ddp(torch.randn(3, 4)).sum().backward()

    return outcome_of(train)


def test_sync_batch_norm_needs_every_rank(on_ranks):
    for raised in on_ranks(2, with_sync_batch_norm, False):
        assert raised.type == "InvalidArgumentError" and "'1' is a SyncBatchNorm" in raised.message
    assert on_ranks(2, with_sync_batch_norm, True) == [None, None]  # both end together: nobody ends early
