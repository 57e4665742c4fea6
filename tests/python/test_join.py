"""Ranks with different numbers of batches, from Python."""

import pytest
import torch
import unisono
from ranks import outcome_of
from torch import nn
from torch_group import torch_group
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


def normalised(process_group=None, layer=None):
    torch.manual_seed(3)
    layer = layer or (lambda: unisono.SyncBatchNorm(5, process_group=process_group))
    return nn.Sequential(nn.Linear(4, 5), layer(), nn.Tanh(), nn.Linear(5, 5), layer(), nn.Linear(5, 1)).double()


def micro_batches(rank, steps):
    """Three per step, the last of each step synchronising."""
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randn(3 + rank, 4, generator=generator, dtype=torch.float64) for _ in range(3)] for _ in range(steps)]


STEPS = [4, 2, 3]


def joined_with_sync_batch_norm(group):
    net = normalised(group)
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(2):
        with ddp.join():
            for micros in micro_batches(group.rank() + 10 * epoch, STEPS[group.rank()]):
                optimizer.zero_grad()
                for i, x in enumerate(micros):
                    with ddp.no_sync(enabled=i < len(micros) - 1):
                        ddp.weight(ddp(x).pow(2).mean(), len(x)).backward()
                optimizer.step()
    return ddp.replicas_identical(), [t.tolist() for t in [*net.parameters(), *net.buffers()]]


def test_sync_batch_norm_inside_join_is_one_process_on_the_union(on_ranks):
    net = normalised(layer=lambda: nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(2):
        everyone = [micro_batches(rank + 10 * epoch, steps) for rank, steps in enumerate(STEPS)]
        for step in range(max(STEPS)):
            optimizer.zero_grad()
            count, total = 0, 0
            for i in range(3):
                x = torch.cat([batches[step][i] for batches in everyone if step < len(batches)])
                total = total + net(x).pow(2).sum()
                count += len(x)
            (total / count).backward()
            optimizer.step()
    for identical, values in on_ranks(3, joined_with_sync_batch_norm):
        assert identical
        for ours, reference in zip(values, [*net.parameters(), *net.buffers()], strict=True):
            # f64 throughout; the statistics are summed in another order
            torch.testing.assert_close(torch.tensor(ours, dtype=reference.dtype), reference.detach(), rtol=1e-10, atol=1e-12)


def ends_in_the_middle(group):
    """Rank 1 runs out of inputs after the first of a step's two micro-batches."""
    net = normalised(group)
    ddp = DistributedDataParallel(net, process_group=group)
    with ddp.join():
        for step in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(torch.ones(2, 4, dtype=torch.float64) * step).sum().backward()
            if group.rank() == 1 and step == 1:
                break
            ddp(torch.ones(2, 4, dtype=torch.float64) - step).sum().backward()
    return ddp.replicas_identical()


def test_a_rank_that_ends_in_the_middle_of_a_step(on_ranks):
    assert on_ranks(2, ends_in_the_middle) == [True, True]


def with_torch_sync_batch_norm(group, throw):
    net = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    ddp = DistributedDataParallel(net, process_group=group)

    def train():
        with ddp.join(throw_on_early_termination=throw):
            pass

    return outcome_of(train)


def test_torchs_sync_batch_norm_needs_every_rank(on_ranks):
    for raised in on_ranks(2, with_torch_sync_batch_norm, False):
        assert raised.type == "InvalidArgumentError" and "'1' is torch's SyncBatchNorm" in raised.message
    assert on_ranks(2, with_torch_sync_batch_norm, True) == [None, None]  # both end together: nobody ends early


def with_sparse(group, by_initial):
    """Rank 0 has three batches, rank 1 one: row r of a sparse table and a dense layer."""
    net = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1, bias=False))
    nn.init.ones_(net[0].weight)
    nn.init.ones_(net[1].weight)
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0)
    seen = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for _ in range(3 if group.rank() == 0 else 1):
            net.zero_grad()
            ddp(torch.tensor([group.rank(), 3])).sum().backward()
            table = net[0].weight.grad
            seen.append((table.is_sparse, table.to_dense()[:, 0].tolist(), net[1].weight.grad.tolist()))
    return seen, ddp.replicas_identical()


@pytest.mark.parametrize("by_initial", [True, False])
def test_sparse_gradients_inside_join(on_ranks, by_initial):
    (first, identical), (second, _) = on_ranks(2, with_sparse, by_initial)
    both = (True, [0.5, 0.5, 0.0, 1.0, 0.0], [[2.0, 2.0]])
    share = 0.5 if by_initial else 1.0
    alone = (True, [share, 0.0, 0.0, share, 0.0], [[2 * share, 2 * share]])
    assert first == [both, alone, alone]
    assert second == [both]
    assert identical


def with_unused_and_transform(group):
    """Layers taken in turns, gradients as bf16, three ranks that end at different steps."""
    net = nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(2))
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0)
    ddp.set_transform(unisono.transforms.bf16())
    seen = []
    with ddp.join():
        for step in range(1 + group.rank()):
            ddp.zero_grad()
            net[step % 2](torch.full((1, 4), 3.0)).sum().backward()
            seen.append([None if layer.weight.grad is None else layer.weight.grad[0, 0].item() for layer in net])
    return seen


def test_unused_layers_and_a_transform_inside_join(on_ranks):
    step0, step1, step2 = [3.0, None], [None, 2.0], [1.0, None]
    assert on_ranks(3, with_unused_and_transform) == [[step0], [step0, step1], [step0, step1, step2]]


def over_gloo():
    with torch_group("gloo") as world:
        return steps(world, True, False), steps(world, False, False), joined_with_sync_batch_norm(world)[0]


def test_over_gloo(on_ranks):
    (initial, active, identical), (one, other, _) = on_ranks(2, over_gloo, group=False)
    assert initial == ([1, 0.5, 0.5], True) and active == ([1, 1, 1], True)
    assert one == other == ([1], True)
    assert identical
