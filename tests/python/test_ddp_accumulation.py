"""Gradients that accumulate, are handled between steps, or weighted. Case numbers of the bug list."""

import pytest
import torch
from small_models import TwoLayers, linear, x_of
from torch import nn
from unisono import DistributedDataParallel


class UsedInReverse(nn.Module):
    """Registered last layer first: gradients come in another order than the first plan expects."""

    def __init__(self):
        super().__init__()
        self.c, self.b, self.a = (nn.Linear(4, n, bias=False) for n in (1, 4, 4))
        for layer in self.children():
            nn.init.constant_(layer.weight, 0.5)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def rebuilt_while_accumulating(group, cap, view):
    model = UsedInReverse()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=view)
    out = []
    for _ in range(3):
        ddp(x_of(group)).sum().backward()
        out.append(([layer.weight.grad.unique().tolist() for layer in (model.a, model.b, model.c)], ddp.stats.rebuilds))
    return out


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("cap", [0, 20 / 2**20, 25])
def test_rebuild_keeps_what_has_accumulated(on_ranks, cap, view):
    """C4."""
    expected = [([[1.5 * n], [1.5 * n], [6.0 * n]], min(n - 1, 1)) for n in (1, 2, 3)]
    assert on_ranks(2, rebuilt_while_accumulating, cap, view) == [expected] * 2


def accumulation_rounds(group, options):
    ddp = DistributedDataParallel(linear(), process_group=group, **options)
    out = []
    for _ in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x_of(group)).sum().backward()
            ddp(x_of(group, 2)).sum().backward()
        local = ddp.module.weight.grad[0, 0].item()
        step = ddp.stats.step
        ddp(x_of(group, 3)).sum().backward()
        out.append((local, ddp.module.weight.grad[0, 0].item(), ddp.stats.step - step, ddp.stats.messages))
    return out


@pytest.mark.parametrize("options", [
    {}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False},
    {"static_graph": True, "find_unused_parameters": True, "gradient_as_bucket_view": False},
], ids=str)
def test_no_sync_rounds(on_ranks, options):
    """C1, C5: one bucket, so one message a round."""
    for rank, rounds in enumerate(on_ranks(2, accumulation_rounds, options)):
        assert [r[:3] for r in rounds] == [(3.0 * (rank + 1), 9.0, 1)] * 3
        assert [r[3] for r in rounds] == [1] * 3


def synchronised_by_hand(group):
    ddp = DistributedDataParallel(linear(), process_group=group)
    with ddp.no_sync():
        for _ in range(3):
            ddp(x_of(group)).sum().backward()
    local = ddp.module.weight.grad[0, 0].item()
    ddp.sync_grads()
    return local, ddp.module.weight.grad[0, 0].item()


def test_sync_grads_without_a_backward(on_ranks):
    """C3, its second half."""
    assert on_ranks(2, synchronised_by_hand) == [(3.0, 4.5), (6.0, 4.5)]


def no_sync_restores(group):
    ddp = DistributedDataParallel(linear(), process_group=group)
    with ddp.no_sync(), ddp.no_sync(enabled=False):
        inside = ddp._core.sync()
    try:
        with ddp.no_sync():
            raise KeyError
    except KeyError:
        pass
    return inside, ddp._core.sync()


def test_no_sync_nests_and_survives_exceptions(on_ranks):
    assert on_ranks(1, no_sync_restores) == [(False, True)]


def tampering(group, what):
    ddp = DistributedDataParallel(nn.Sequential(linear(), nn.Linear(1, 1, bias=False)), process_group=group)
    model = ddp.module
    nn.init.ones_(model[1].weight)
    held = None
    out = []
    for _ in range(3):
        ddp(x_of(group)).sum().backward()
        grad = model[0].weight.grad
        out.append(grad[0, 0].item())
        if what == "clear one":
            model[0].weight.grad = None
        elif what == "clone one":
            model[0].weight.grad = grad.clone()
        elif what == "scale one":
            grad.mul_(0.5)
        elif what == "hold one":
            held = grad
            ddp.zero_grad(set_to_none=True)
    return out, held is None or held.shape == grad.shape


@pytest.mark.parametrize("what, expected", [
    ("clear one", [1.5, 1.5, 1.5]),
    ("clone one", [1.5, 3.0, 4.5]),
    ("scale one", [1.5, 2.25, 2.625]),
    ("hold one", [1.5, 1.5, 1.5]),
])
def test_gradients_handled_between_steps(on_ranks, what, expected):
    """C6."""
    assert on_ranks(2, tampering, what) == [(expected, True)] * 2


def weighted(group, plan):
    ddp = DistributedDataParallel(linear(1, 0.0), process_group=group)
    batches = [torch.full((n, 1), value) for n, value in plan[group.rank()]]
    for i, batch in enumerate(batches):
        loss = ddp(batch).mean() if len(batch) else ddp(torch.zeros(1, 1)).sum() * 0
        with ddp.no_sync(enabled=i + 1 < len(batches)):
            ddp.weight(loss, len(batch)).backward()
    return ddp.module.weight.grad.item()


@pytest.mark.parametrize("plan, expected", [
    (([(5, 1.0)], [(1, 10.0)]), 2.5),
    (([(2, 1.0), (3, 1.0)], [(1, 10.0), (0, 0.0)]), 2.5),
    (([(5, 2.0)], [(0, 0.0)]), 2.0),
    (([(0, 0.0)], [(0, 0.0)]), 0.0),
], ids=["one batch each", "micro-batches", "a rank without samples", "no samples at all"])
def test_true_average(on_ranks, plan, expected):
    """C7."""
    assert on_ranks(2, weighted, plan) == [expected] * 2


def shares_storage(group, view):
    ddp = DistributedDataParallel(TwoLayers(use_a=True), process_group=group, gradient_as_bucket_view=view)
    ddp(x_of(group)).sum().backward()
    a, b = (layer.weight.grad.untyped_storage().data_ptr() for layer in (ddp.module.a, ddp.module.b))
    return a == b


@pytest.mark.parametrize("view", [True, False])
def test_gradients_are_views_into_one_bucket_unless_told_otherwise(on_ranks, view):
    assert on_ranks(1, shares_storage, view) == [view]


def held(group, views):
    net = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=views)
    kept = []
    for step in range(1, 5):
        net.zero_grad(set_to_none=True)
        ddp(torch.full((1, 4), float(step))).sum().backward()
        kept.append(net.weight.grad)
    return [gradient[0, 0].item() for gradient in kept[2:]]


@pytest.mark.parametrize(("views", "expected"), [(True, [4.0, 4.0]), (False, [3.0, 4.0])])
def test_a_held_gradient(on_ranks, views, expected):
    """A view of a bucket is the next step's gradient, as with torch's gradient_as_bucket_view; without views it stays."""
    assert on_ranks(2, held, views) == [expected] * 2
