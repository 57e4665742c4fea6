"""Steps on gradients that nobody averaged (C3), and the walk from forward's outputs."""

import dataclasses

import pytest
import torch
from ranks import outcome_of
from torch import nn
from unisono import DistributedDataParallel
from unisono.outputs import tensors_in


def accumulate_only(group, options):
    ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False), process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    before = ddp.digest()
    for _ in range(3):
        with ddp.no_sync():
            ddp(torch.full((1, 4), group.rank() + 1.0)).sum().backward()
    other.step()  # not ours
    refused = outcome_of(optimizer.step)
    untouched = ddp.digest() == before
    ddp.sync_grads()
    grad = ddp.module.weight.grad[0, 0].item()
    optimizer.step()
    return refused, untouched, grad, ddp.replicas_identical()


def test_a_step_on_local_gradients_is_refused(on_ranks):
    for refused, untouched, grad, identical in on_ranks(2, accumulate_only, {}):
        assert refused.type == "InvalidArgumentError" and "sync_grads()" in refused.message
        assert untouched and grad == 4.5 and identical


def test_the_guard_can_be_left_out(on_ranks):
    for refused, untouched, _, identical in on_ranks(2, accumulate_only, {"step_guard": False}):
        assert refused is None and not untouched and not identical


class Growing(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.register_parameter("extra", None)

    def forward(self, x):
        return super().forward(x) if self.extra is None else super().forward(x) + x @ self.extra


def added_later(group):
    ddp = DistributedDataParallel(Growing(), process_group=group)
    ddp.module.extra = nn.Parameter(torch.ones(4, 1))
    optimizer = torch.optim.SGD([ddp.module.extra], 0.1)
    with ddp.no_sync():
        ddp(torch.full((1, 4), group.rank() + 1.0)).sum().backward()
    refused = outcome_of(optimizer.step)
    untouched = torch.equal(ddp.module.extra, torch.ones(4, 1))
    ddp.sync_grads()
    optimizer.step()
    return refused, untouched, ddp.replicas_identical()


def test_a_parameter_added_later_is_guarded(on_ranks):
    for refused, untouched, identical in on_ranks(2, added_later):
        assert refused.type == "InvalidArgumentError" and "sync_grads()" in refused.message
        assert untouched and identical


def ignored(group, by_keyword):
    """An ignored parameter is stepped on with each rank's own gradient, whenever its optimizer likes."""
    module = nn.Linear(4, 1)
    if not by_keyword:
        module._ddp_params_and_buffers_to_ignore = ["bias"]
    ddp = DistributedDataParallel(module, process_group=group, parameters_and_buffers_to_ignore=["bias"] if by_keyword else [])
    with ddp.no_sync():
        ddp(torch.ones(1, 4)).sum().backward()
    return outcome_of(torch.optim.SGD([module.bias], 0.1).step), outcome_of(torch.optim.SGD([module.weight], 0.1).step)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_an_ignored_parameter_is_not_guarded(on_ranks, by_keyword):
    for of_ignored, of_averaged in on_ranks(2, ignored, by_keyword):
        assert of_ignored is None
        assert of_averaged.type == "InvalidArgumentError"


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    rest: dict


class Plain:
    def __init__(self, value):
        self.value = value


def test_tensors_are_found_in_any_output():
    t = torch.ones(1)
    assert len(tensors_in(t)) == 1
    assert len(tensors_in((t, [t, {"a": t}], "text", None, 3))) == 3
    assert len(tensors_in(Output(t, {"b": Plain(t)}))) == 2
    assert tensors_in(nn.Linear(1, 1)) == []


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(4, 1, bias=False) for _ in range(2))

    def forward(self, x, use_a):
        return Output(self.a(x) if use_a else self.b(x), {})


def find_unused(group, momentum):
    """Rank 0 always takes b; rank 1 takes a in step 1. Returns a's gradient and a's and b's weights after each step."""
    torch.manual_seed(0)
    model = Branches()
    nn.init.ones_(model.a.weight), nn.init.ones_(model.b.weight)
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True, bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=momentum)
    out = []
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.full((1, 4), group.rank() + 1.0), group.rank() == 1 and step == 1).logits.sum().backward()
        grad = None if model.a.weight.grad is None else model.a.weight.grad[0, 0].item()
        optimizer.step()
        out.append((grad, model.a.weight[0, 0].item(), model.b.weight[0, 0].item()))
    return out, ddp.digest()


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_unused_parameters_with_momentum(on_ranks, momentum):
    """Untouched when no rank used the parameter, also by momentum; updated on all ranks when one did."""
    results = on_ranks(2, find_unused, momentum)
    assert results[0] == results[1]
    steps = results[0][0]
    assert [grad for grad, _, _ in steps] == [None, 1.0, None]
    assert [a for _, a, _ in steps] == [1.0, 0.5, 0.5]
    if momentum == 0:  # b: means 1.5, 0.5, 1.5 times 0.5
        assert [b for _, _, b in steps] == [0.25, 0.0, -0.75]
