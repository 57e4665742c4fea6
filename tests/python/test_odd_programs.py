"""Programs that people write and wrappers get wrong: gradients that are replaced or taken away, networks frozen for a while, steps
that are thrown away, joins in which the module changes, transforms whose parameters are exchanged."""

import copy

import pytest
import torch
import unisono
from ranks import outcome_of
from torch import nn
from unisono import DistributedDataParallel


def linear(inputs, outputs, value=1.0):
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def with_replaced_data(group, to_none, views):
    model = nn.Sequential(linear(2, 2), linear(2, 1))
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views)
    seen = []
    for _ in range(3):
        ddp(torch.full((1, 2), group.rank() + 1.0)).sum().backward()
        seen.append([p.grad[0].tolist() for p in model.parameters()])
        for p in model.parameters():
            p.grad.data = p.grad.data.clamp(-1, 1)
        model.zero_grad(set_to_none=to_none)
    return seen


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_grad_data_may_be_assigned(on_ranks, to_none, views):
    for seen in on_ranks(2, with_replaced_data, to_none, views):
        assert seen == [[[1.5, 1.5], [3.0, 3.0]]] * 3


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = linear(2, 1), linear(2, 1)

    def forward(self, x):
        return self.used(x)


def taken_by_a_hook(group, model):
    ddp = DistributedDataParallel(model, process_group=group)
    parameter = next(model.parameters())
    for _ in range(2):  # leaves averages in the bucket
        ddp(torch.full((1, 2), 10.0 * (group.rank() + 1))).sum().backward()
        model.zero_grad()
    kept, seen = [], []

    def take(p):
        kept.append(p.grad.tolist())
        p.grad = None

    parameter.register_post_accumulate_grad_hook(take)
    for _ in range(2):
        ddp(torch.full((1, 2), group.rank() + 1.0)).sum().backward()
        seen.append(parameter.grad)
        model.zero_grad()
    return kept, seen


@pytest.mark.parametrize("model", [WithUnused(), linear(2, 1)], ids=["one unused", "all used"])
def test_a_gradient_taken_away_by_a_hook_stays_away(on_ranks, model):
    for rank, (kept, seen) in enumerate(on_ranks(2, taken_by_a_hook, model)):
        assert kept == [[[rank + 1.0] * 2]] * 2
        assert seen == [None, None]


def adversaries(generator, discriminator, inputs):
    """Three steps in which the discriminator is frozen while the generator learns."""
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (generator, discriminator)]
    for z in inputs:
        discriminator.requires_grad_(False)
        discriminator(generator(z)).mean().backward()
        optimizers[0].step()
        discriminator.requires_grad_(True)
        discriminator(generator(z).detach()).square().mean().backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [p.detach() for m in (generator, discriminator) for p in m.parameters()]


def adversarial(group, models, inputs):
    wrapped = [DistributedDataParallel(copy.deepcopy(m), process_group=group) for m in models]  # given in shared memory
    out = adversaries(*wrapped, [z.chunk(2)[group.rank()] for z in inputs])
    return out, [w.replicas_identical() for w in wrapped]


def test_a_network_frozen_as_a_whole(on_ranks):
    torch.manual_seed(0)
    models = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    inputs = [torch.randn(8, 3) for _ in range(3)]
    together = adversaries(*copy.deepcopy(models), inputs)
    for parameters, identical in on_ranks(2, adversarial, models, inputs):
        assert identical == [True, True]
        for ours, theirs in zip(parameters, together, strict=True):
            torch.testing.assert_close(ours, theirs)  # means of means: another order of additions


def after_a_dry_run(group):
    """A backward under no_sync whose gradients are thrown away leaves nothing behind."""
    x, outcomes = torch.full((1, 2), group.rank() + 1.0), []

    def fresh():
        model = nn.Sequential(linear(2, 2), linear(2, 1))
        ddp = DistributedDataParallel(model, process_group=group)
        with ddp.no_sync():
            ddp(x).sum().backward()
        assert ddp.has_unsynchronised_gradients()
        model.zero_grad()
        assert not ddp.has_unsynchronised_gradients()
        return model, ddp

    _, ddp = fresh()
    outcomes.append(outcome_of(ddp.set_transform, unisono.transforms.bf16()))
    _, ddp = fresh()
    with ddp.join():
        pass
    model, ddp = fresh()
    model[0].requires_grad_(False)
    ddp(x).sum().backward()
    return outcomes, model[1].weight.grad.tolist()


def test_a_dry_run_leaves_nothing_behind(on_ranks):
    assert on_ranks(2, after_a_dry_run) == [([None], [[3.0, 3.0]])] * 2


def retried(group):
    model = nn.Sequential(linear(2, 2), linear(2, 1))
    ddp = DistributedDataParallel(model, process_group=group)
    x, fails = torch.full((1, 2), group.rank() + 1.0), [group.rank() == 0]

    def fail(gradient):
        if fails[0]:
            raise RuntimeError("a bad batch")

    model[0].weight.register_hook(fail)
    with ddp.no_sync():
        for i in range(2):
            try:
                ddp(x).sum().backward()
            except RuntimeError:
                assert i == 0 and group.rank() == 0
                fails[0] = False
                model.zero_grad(set_to_none=False)
                ddp(x).sum().backward()
    ddp(x).sum().backward()
    return model[1].weight.grad.tolist()


def test_a_micro_batch_may_be_tried_again(on_ranks):
    assert on_ranks(2, retried) == [[[9.0, 9.0]]] * 2


def unfrozen_in_a_join(group, check):
    model = nn.Sequential(linear(2, 2), linear(2, 1))
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model, process_group=group, check_replicas=check)
    steps = 0
    with ddp.join():
        for i in range(2 + 2 * group.rank()):
            if i == 1:
                model[0].requires_grad_(True)
            model.zero_grad()
            ddp(torch.full((1, 2), group.rank() + 1.0)).sum().backward()
            steps += 1
    return steps, ddp.replicas_identical()


@pytest.mark.parametrize("check", [True, False])
def test_a_module_may_change_inside_join(on_ranks, check):
    assert on_ranks(2, unfrozen_in_a_join, check) == [(2, True), (4, True)]


def exchanged(group, transform, outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.set_transform(transform())
    for i in range(6):
        if i == 3:
            model[1] = nn.Linear(8, outputs)
        model.zero_grad()
        ddp(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * i + group.rank()))).square().sum().backward()
    with ddp.no_sync():
        own = copy.deepcopy(model)
        own.zero_grad()
        own(torch.randn(4, 8, generator=torch.Generator().manual_seed(50 + group.rank()))).square().sum().backward()
    return model[1].weight.grad, own[1].weight.grad, ddp.replicas_identical()


def int8():
    return unisono.transforms.int8()


def power_sgd():
    return unisono.transforms.power_sgd(rank=8, start_step=0, min_compression=0.1)


@pytest.mark.parametrize("transform", [int8, power_sgd])
@pytest.mark.parametrize("outputs", [3, 16])
def test_a_layer_of_another_shape_takes_no_error_over(on_ranks, transform, outputs):
    (first, own, identical), (second, other, _) = on_ranks(2, exchanged, transform, outputs)
    assert identical and torch.equal(first, second)
    mean = (own + other) / 2
    # Two steps of int8's error, each at most half of 1/127 of the largest element of the bucket; rank 8 loses nothing of 8 columns.
    torch.testing.assert_close(first, mean, rtol=0, atol=float(max(own.abs().max(), other.abs().max())) * 0.05)


def after_an_overflow(group):
    model = nn.Sequential(nn.Linear(8, 8))
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.set_transform(power_sgd())
    finite = []
    for i in range(5):
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * i + group.rank()))
        (ddp(x).square().sum() * (float("inf") if i == 2 and group.rank() == 1 else 1.0)).backward()
        finite.append(bool(model[0].weight.grad.isfinite().all()))
    return finite, ddp.replicas_identical()


def test_power_sgd_forgets_a_step_that_overflowed(on_ranks):
    assert on_ranks(2, after_an_overflow) == [([True, True, False, True, True], True)] * 2
