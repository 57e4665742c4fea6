"""Odd graphs: unused parameters, outputs of any type, checkpoints, several forwards. Case numbers of the bug list."""

import dataclasses

import pytest
import torch
from ranks import outcome_of
from small_models import TwoLayers, linear, x_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from unisono import DistributedDataParallel


def unused(group, options):
    ddp = DistributedDataParallel(TwoLayers(use_a=False), process_group=group, **options)
    out = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(x_of(group)).sum().backward()
        out.append((ddp.module.a.weight.grad, ddp.module.b.weight.grad.tolist()))
    return out


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"naive": True}, {"overlap": False}], ids=str)
def test_an_unused_parameter(on_ranks, options):
    """B1."""
    assert on_ranks(2, unused, options) == [[(None, [[1.5] * 4])] * 2] * 2


def outcome_of_unused(group, options):
    return outcome_of(unused, group, options)


def test_strict_mode_names_an_unused_parameter(on_ranks):
    """B1."""
    for result in on_ranks(2, outcome_of_unused, {"strict": True}):
        assert "a.weight" in result.message
        assert "Error" in result.bases


def used_on_rank_0_only(group):
    ddp = DistributedDataParallel(TwoLayers(use_a=group.rank() == 0), process_group=group)
    out = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(group)).sum().backward()
        out.append((ddp.module.a.weight.grad.tolist(), ddp.module.b.weight.grad.tolist()))
    return out


def test_a_parameter_used_on_one_rank_only(on_ranks):
    assert on_ranks(2, used_on_rank_0_only) == [[([[0.5] * 4], [[1.5] * 4])] * 3] * 2


@dataclasses.dataclass
class Result:
    value: torch.Tensor


class PlainResult:
    def __init__(self, value):
        self.value = value


class Wrapping(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = linear(), kind

    def forward(self, x):
        return self.kind(self.layer(x))


def odd_outputs(group, kind, options):
    ddp = DistributedDataParallel(Wrapping(kind), process_group=group, **options)
    out = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(x_of(group)).value.sum().backward()
        out.append(ddp.module.layer.weight.grad.tolist())
    return out


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("kind", [Result, PlainResult])
def test_any_type_of_output(on_ranks, kind, options):
    """B2."""
    assert on_ranks(2, odd_outputs, kind, options) == [[[[1.5] * 4]] * 4] * 2


def nested_checkpoints(group):
    inner = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        inner.weight.copy_(2 * torch.eye(4))
    outer = nn.Linear(4, 1, bias=False)
    nn.init.ones_(outer.weight)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = inner, outer

        def forward(self, x):
            def once(y):
                return checkpoint(self.inner, y, use_reentrant=True)

            return self.outer(checkpoint(lambda y: self.inner(once(y)), x, use_reentrant=True))

    ddp = DistributedDataParallel(Net(), process_group=group)
    out = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(x_of(group).requires_grad_()).sum().backward()
        out.append(inner.weight.grad[0, 0].item())
    return out


def test_nested_reentrant_checkpoints(on_ranks):
    """B5."""
    assert on_ranks(2, nested_checkpoints) == [[6.0, 6.0]] * 2


def two_forwards_then_two_backwards(group):
    ddp = DistributedDataParallel(linear(), process_group=group)
    a, b = ddp(x_of(group)), ddp(x_of(group, 2))
    a.sum().backward()
    b.sum().backward()
    return ddp.module.weight.grad.tolist()


def test_two_forwards_then_two_backwards(on_ranks):
    """B7."""
    assert on_ranks(2, two_forwards_then_two_backwards) == [[[4.5] * 4]] * 2


def past_the_wrapper(group):
    ddp = DistributedDataParallel(linear(), process_group=group)
    ddp.module(x_of(group)).sum().backward()
    return ddp.module.weight.grad.tolist()


def test_the_inner_module_called_directly(on_ranks):
    assert on_ranks(2, past_the_wrapper) == [[[1.5] * 4]] * 2


def two_wrappers_in_one_checkpoint(group, inner):
    first = nn.Linear(4, 4, bias=False)
    nn.init.ones_(first.weight)
    a, b = DistributedDataParallel(first, process_group=group), DistributedDataParallel(linear(), process_group=group)

    def both(x):
        return checkpoint(lambda y: b(a(y)), x, use_reentrant=True)

    out = []
    for _ in range(3):
        a.zero_grad()
        b.zero_grad()
        x = x_of(group).requires_grad_()
        (checkpoint(both, x, use_reentrant=True) if inner else both(x)).sum().backward()
        out.append((first.weight.grad[0, 0].item(), b.module.weight.grad[0, 0].item()))
    return out, a.has_unsynchronised_gradients(), b.has_unsynchronised_gradients()


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_two_wrappers_in_one_reentrant_checkpoint(on_ranks, ranks, inner):
    """B5, of two wrappers: each learns of the end of the outer backward."""
    mean = (ranks + 1) / 2
    assert on_ranks(ranks, two_wrappers_in_one_checkpoint, inner) == [([(mean, 4 * mean)] * 3, False, False)] * ranks
