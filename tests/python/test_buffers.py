"""Buffers of unisono.DistributedDataParallel: when they are brought, by whom, and what happens when they changed."""

import gc
import weakref

import pytest
import torch
import unisono
from ranks import outcome_of
from torch import nn
from unisono import DistributedDataParallel


class WithBuffers(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("level", torch.full((2,), float(value)))
        self.register_buffer("count", torch.tensor(int(value)))
        self.changes = None

    def forward(self, x):
        if self.changes:
            self.changes(self)
        return self.layer(x)


def wrapped(group, value=None, **options):
    module = WithBuffers(group.rank() + 1 if value is None else value)
    return module, DistributedDataParallel(module, process_group=group, **options)


def step(ddp):
    ddp(torch.ones(1, 2)).sum().backward()


def values(module):
    return module.level.tolist(), module.count.item()


# --------------------------------------------------------------------------- construction and forward are two switches

def switches(group, options):
    torch.manual_seed(0)  # without init_sync the parameters must be alike from the start
    module, ddp = wrapped(group, **options)
    out = [module.level[0].item()]
    module.level.fill_(10.0 + group.rank())
    ddp(torch.ones(1, 2))
    out.append(module.level[0].item())
    step(ddp)
    module.level.fill_(20.0 + group.rank())
    ddp(torch.ones(1, 2))
    return [*out, module.level[0].item()]


# What rank 1 holds after construction, after the first forward, and after a forward that follows a synchronisation.
@pytest.mark.parametrize("options, expected", [
    ({}, [1, 11, 20]),
    ({"broadcast_buffers": True}, [1, 11, 20]),
    ({"broadcast_buffers": False}, [1, 11, 21]),
    ({"forward_sync_buffers": False}, [1, 11, 21]),
    ({"broadcast_buffers": False, "forward_sync_buffers": True}, [1, 11, 20]),
    ({"broadcast_buffers": True, "forward_sync_buffers": False}, [1, 11, 21]),
    ({"init_sync": False}, [2, 10, 20]),
    ({"init_sync": False, "broadcast_buffers": False}, [2, 11, 21]),
    ({"init_sync": False, "forward_sync_buffers": True}, [2, 10, 20]),
], ids=str)
def test_two_switches(on_ranks, options, expected):
    assert on_ranks(2, switches, options)[1] == expected


# -------------------------------------------------------------------------------------------------- policies and hooks

def by_policy(group, policy):
    module, ddp = wrapped(group, buffer_policy=policy)
    step(ddp)
    module.level.fill_(group.rank() + 1.0)
    module.count.fill_(group.rank() + 5)
    ddp(torch.ones(1, 2))
    return values(module)


@pytest.mark.parametrize("policy, expected", [("rank0", ([1.0] * 2, 5)), ("mean", ([2.0] * 2, 5))])
def test_policy(on_ranks, policy, expected):
    assert on_ranks(3, by_policy, policy) == [expected] * 3


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="buffer_policy='median'.*'rank0' or 'mean'"):
        DistributedDataParallel(nn.Linear(1, 1), process_group=unisono.init("serial", 0, 1), buffer_policy="median")


def hooked(group):
    module, ddp = wrapped(group, parameters_and_buffers_to_ignore=["level"])
    seen = []

    def hook(state, buffers):
        state.append((sorted(buffers), torch.is_grad_enabled()))
        return [group.all_reduce(b) for b in buffers.values()]

    ddp.register_buffer_comm_hook(seen, hook)
    step(ddp)
    module.count.fill_(group.rank() + 1)
    ddp(torch.ones(1, 2))
    ddp(torch.ones(1, 2))
    with torch.no_grad():
        ddp(torch.ones(1, 2))
    summed = module.count.item()
    ddp.register_buffer_comm_hook(None, None)
    ddp.sync_state()
    return seen, summed, module.level[0].item()


def test_a_hook_takes_the_place_of_the_policy(on_ranks):
    assert on_ranks(2, hooked) == [([(["count"], False)], 3, rank + 1.0) for rank in (0, 1)]


def hook_that_raises(group):
    _, ddp = wrapped(group)

    def hook(state, buffers):
        raise KeyError("mine")

    ddp.register_buffer_comm_hook(None, hook)
    step(ddp)
    outcome = outcome_of(step, ddp)
    ddp.register_buffer_comm_hook(None, None)
    step(ddp)
    return outcome.type, outcome.message, ddp.replicas_identical()


def test_what_a_hook_raises_is_raised(on_ranks):
    assert on_ranks(2, hook_that_raises) == [("KeyError", "'mine'", True)] * 2


def hook_with_the_wrapper_as_state(group):
    _, ddp = wrapped(group)
    ddp.register_buffer_comm_hook(ddp, lambda state, buffers: None)
    reference = weakref.ref(ddp)
    del ddp
    gc.collect()
    return reference() is None


def test_a_hook_does_not_keep_the_wrapper_alive(on_ranks):
    assert on_ranks(2, hook_with_the_wrapper_as_state) == [True, True]


# ------------------------------------------------------------------------------------------------------ changed buffers

def reassigned(group):
    module, ddp = wrapped(group)
    out = []

    def change(m):
        m.level = torch.full((3,), float(group.rank() + 7), dtype=torch.float64)

    for changes in (change, None, None):
        module.changes = changes
        step(ddp)
        out.append((str(module.level.dtype), module.level.tolist(), ddp.digest()))
    ddp.sync_state()
    return out[1:], ddp.replicas_identical()


def test_buffers_reassigned_in_forward_are_followed(on_ranks):
    results = on_ranks(2, reassigned)
    assert results[0] == results[1]
    (first, _), identical = results[0]
    assert first[:2] == ("torch.float64", [7.0] * 3)
    assert identical


def reassigned_on_one_rank(group, who, shape, dtype, policy):
    module, ddp = wrapped(group, buffer_policy=policy)
    step(ddp)
    good = module.level
    if group.rank() == who:
        module.level = torch.zeros(shape, dtype=getattr(torch, dtype))
    outcome = outcome_of(step, ddp)
    module.level = good
    module.count.fill_(group.rank() + 4)
    step(ddp)
    return outcome.bases, outcome.message, module.count.item()


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("shape, dtype, said", [
    ((3,), "float32", "Float [3]"), ((1, 2), "float32", "Float [1, 2]"), ((2,), "int32", "Int [2]"),
    ((2,), "float64", "Double [2]")], ids=str)
def test_a_buffer_changed_on_one_rank_is_named_on_every_rank(on_ranks, who, shape, dtype, said, policy):
    results = on_ranks(2, reassigned_on_one_rank, who, shape, dtype, policy)
    assert results[0] == results[1]
    bases, message, count = results[0]
    assert "MismatchError" in bases
    assert f"rank {who} has buffer 0: 'level' {said}" in message
    assert f"rank {1 - who} has buffer 0: 'level' Float [2]" in message
    assert count == 4


# --------------------------------------------------------------------------------------------- BatchNorm and evaluation

def normed(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def two_forwards(group):
    module = normed(group.rank())
    ddp = DistributedDataParallel(module, process_group=group)
    torch.manual_seed(group.rank())
    kept = ddp(torch.randn(5, 3))
    for _ in range(3):
        first, second = ddp(torch.randn(5, 3)), ddp(torch.randn(5, 3))
        (first.square().sum() + second.sum()).backward()
    ddp(torch.randn(5, 3))
    kept.sum().backward()
    return module[1].num_batches_tracked.item(), ddp.replicas_identical()


def test_batch_norm_with_two_forwards_before_backward(on_ranks):
    """And one forward whose backward comes after the buffers were brought three times."""
    assert on_ranks(2, two_forwards) == [(8, True)] * 2


def evaluates_alone(group):
    module = normed(0)
    ddp = DistributedDataParallel(module, process_group=group)
    torch.manual_seed(group.rank())
    ddp(torch.randn(5, 3)).sum().backward()
    before = module[1].running_mean.tolist()
    if group.rank() == 1:
        ddp.eval()
        ddp(torch.randn(5, 3))
        ddp.train()
        with torch.no_grad():
            ddp(torch.randn(5, 3))
        with torch.inference_mode():
            ddp(torch.randn(5, 3))
    ddp.sync_state()
    return before, module[1].running_mean.tolist(), ddp.replicas_identical()


def test_evaluation_makes_no_collective_and_sync_state_before_it_does(on_ranks):
    (before_0, after_0, same_0), (before_1, after_1, same_1) = on_ranks(2, evaluates_alone)
    assert before_0 != before_1
    assert after_0 == after_1 == before_0
    assert same_0 and same_1
