"""Optimizers inside backward, from Python."""

import types
import warnings

import pytest
import torch
from ranks import outcome_of
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from unisono import DistributedDataParallel


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def both_ways(group, make, max_norm, cap):
    results = []
    for inside in (True, False):
        model = net()
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap)
        optimizers = make(model)
        schedule = lr_scheduler.StepLR(optimizers[0], 2, gamma=0.5)
        if inside:
            ddp.step_in_backward(*optimizers, max_norm=max_norm)
        torch.manual_seed(group.rank())
        for batch in torch.randn(5, 3, 6):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(batch).pow(2).mean().backward()
            ddp(batch.flip(0)).pow(2).sum().backward()
            if inside:
                assert all(p.grad is None for p in model.parameters())
            elif max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for optimizer in optimizers:
                optimizer.step()
            schedule.step()
        results.append((ddp.digest(), torch.cat([p.detach().flatten() for p in model.parameters()]),
                        [len(o.state) for o in optimizers]))
    (ours, values, states), (afterwards, reference, reference_states) = results
    return ours == afterwards, (values - reference).abs().max().item(), states == reference_states, ours


def adam(model):
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def two(model):
    return [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(model[2].parameters(), lr=0.01)]


@pytest.mark.parametrize("make", [adam, two])
@pytest.mark.parametrize("cap", [None, 0])
def test_the_same_bits_as_afterwards(on_ranks, make, cap):
    results = on_ranks(2, both_ways, make, None, cap)
    assert [r[0] for r in results] == [True, True]
    assert [r[2] for r in results] == [True, True]
    assert results[0][3] == results[1][3]


def test_clipping_in_two_phases(on_ranks):
    results = on_ranks(2, both_ways, two, 0.5, None)
    assert results[0][3] == results[1][3]
    assert all(r[1] < 1e-5 for r in results)  # the norm is summed in f64 here, in f32 by torch


def refusals(group):
    model = net()
    ddp = DistributedDataParallel(model, process_group=group)
    other = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    out = [outcome_of(ddp.step_in_backward, torch.optim.LBFGS(model.parameters())).message,
           outcome_of(ddp.step_in_backward, torch.optim.SGD(other.parameters(), 0.1)).message,
           outcome_of(ddp.step_in_backward, sgd, torch.optim.SGD(model.parameters(), 0.1)).message]
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    out.append(outcome_of(ddp.step_in_backward, sgd).message)
    handle.remove()
    return out


def test_refused_by_name(on_ranks):
    for lbfgs, foreign, twice, hook in on_ranks(2, refusals):
        assert "LBFGS" in lbfgs
        assert "shape (2, 2)" in foreign
        assert "'0.weight' is in two optimizers" in twice
        assert "'0.weight' has a post-accumulate hook" in hook


class OfItsOwn(torch.optim.SGD):
    """SGD with attributes: `k` and the bound `_scaled` are read; `steps`, a lazy one and a setting are written in every step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr, momentum=0.9)
        self.k = 0.5
        self.steps = 0
        self._factor = self._scaled

    def _scaled(self):
        return self.k * len(self.param_groups) / self.steps

    def step(self, closure=None):
        self.steps += 1
        self.later = getattr(self, "later", 0.0) + 0.25
        factor = self._factor() + self.later
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(factor / group["count"])
        return super().step(closure)


def attributes(group, cap, options):
    """Bits, and what the optimizer keeps, of training with the step in backward and after it. Steps 2 and 3 use some parameters only,
    and none of them in both."""
    results = []
    for inside in (True, False):
        model = net()
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap)
        optimizer = OfItsOwn(model.parameters(), 0.1)
        if inside:
            ddp.step_in_backward(optimizer, **options)
        torch.manual_seed(group.rank())
        for step, batch in enumerate(torch.randn(5, 3, 6)):
            if step == 2:
                out = nn.functional.linear(batch[:, :4], model[2].weight.t(), model[0].bias)
            elif step == 3:
                out = nn.functional.linear(batch, model[0].weight) + model[2].bias.sum()
            else:
                out = ddp(batch)
            out.pow(2).mean().backward()
            if not inside:
                if options.get("max_norm"):
                    nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
                optimizer.step()
                optimizer.zero_grad()
            optimizer.k *= 0.5  # for the next step
        ddp.finish_step()
        results.append((ddp.digest(), optimizer.steps, optimizer.later, optimizer.param_groups[0]["count"], optimizer.k,
                        optimizer._factor.__self__ is optimizer))
    return results


@pytest.mark.parametrize("cap", [None, 0])
@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}, {"max_norm": 1e9}])
def test_attributes_of_a_subclass(on_ranks, cap, options):
    for inside, afterwards in on_ranks(2, attributes, cap, options):
        assert inside == afterwards
        assert inside[1:] == (5, 1.25, 5, 0.5 / 32, True)


class Fails(torch.optim.SGD):
    count = 0
    at = None

    def step(self, closure=None):
        self.count += 1
        if any(p.shape == self.at for group in self.param_groups for p in group["params"]):
            raise RuntimeError("the optimizer has had enough")
        return super().step(closure)


def after_a_failure(group):
    """What the parts of a step that failed have written does not count in the next one."""
    model = net()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0)
    optimizer = Fails(model.parameters(), 0.1)
    ddp.step_in_backward(optimizer)
    optimizer.at = model[0].weight.shape
    failure = outcome_of(lambda: ddp(torch.ones(3, 6)).sum().backward())
    optimizer.at, optimizer.count = None, 10
    ddp.zero_grad()
    ddp(torch.ones(3, 6)).sum().backward()
    return failure.message, optimizer.count


def test_attributes_after_a_failed_step(on_ranks):
    for message, count in on_ranks(2, after_a_failure):
        assert "had enough" in message
        assert count == 11


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]),
}


def scheduled(group, name, early, overlap):
    """What is warned of, the bits with the step in backward and after it, and whether the optimizers' own steps still work."""
    results, texts = [], []
    for inside in (True, False):
        model = net()
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        idle = torch.optim.SGD([model[2].bias], 0.1)  # its parameter gets no gradient
        model[2].bias.requires_grad_(False)
        optimizer.param_groups[0]["params"].pop()
        schedules = [SCHEDULERS[name](o) for o in (optimizer, idle)] if early else []
        if inside:
            ddp.step_in_backward(optimizer, idle, overlap_forward=overlap)
        schedules = schedules or [SCHEDULERS[name](o) for o in (optimizer, idle)]
        torch.manual_seed(group.rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in torch.randn(4, 3, 6):
                ddp(batch).pow(2).mean().backward()
                if not inside:
                    optimizer.step(), idle.step()
                    optimizer.zero_grad()
                for schedule in schedules:
                    schedule.step()
        texts += [str(w.message) for w in caught if "lr_scheduler.step()" in str(w.message)]
        results.append((ddp.digest(), optimizer.param_groups[0]["lr"]))
    before = model[0].weight.clone()
    model[0].weight.grad = torch.ones_like(before)
    optimizer.step()
    return texts, results, not torch.equal(before, model[0].weight)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_scheduler_sees_the_step(on_ranks, name, early, overlap):
    for texts, (inside, afterwards), steps in on_ranks(2, scheduled, name, early, overlap):
        assert texts == []
        assert inside == afterwards and steps


def clip(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 0.01)


def with_hooks(group, kind, options):
    """Refused at once; registered later refused by the next backward, which leaves all as it was; gone, all goes on."""
    model = net()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    register = getattr(optimizer, f"register_step_{kind}_hook")
    handle = register(clip)
    out = [outcome_of(ddp.step_in_backward, optimizer)]
    handle.remove()
    ddp.step_in_backward(optimizer, **options)
    ddp(torch.ones(3, 6)).sum().backward()
    before = ddp.digest()
    handle = register(clip)
    out.append(outcome_of(lambda: ddp(torch.ones(3, 6)).sum().backward()))
    untouched = ddp.digest() == before
    handle.remove()
    ddp.zero_grad()
    ddp(torch.ones(3, 6)).sum().backward()
    return out, untouched, ddp.digest() != before, ddp.replicas_identical()


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}, {"max_norm": 1.0}])
def test_step_hooks_are_refused(on_ranks, kind, options):
    for refused, untouched, goes_on, identical in on_ranks(2, with_hooks, kind, options):
        for outcome in refused:
            assert outcome.type == "InvalidArgumentError"
            assert f"SGD has a step {kind}-hook" in outcome.message
        assert untouched and goes_on and identical


def late_hook(group):
    """A hook that comes between a backward and the steps it has left is for the next backward."""
    results = []
    for inside in (True, False):
        model = net()
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if inside:
            ddp.step_in_backward(optimizer, overlap_forward=True)
        ddp(torch.ones(3, 6)).sum().backward()
        if inside:
            optimizer.register_step_pre_hook(clip)
        else:
            optimizer.step()
        results.append(ddp.digest())
    return results


def test_a_hook_after_backward(on_ranks):
    for inside, afterwards in on_ranks(2, late_hook):
        assert inside == afterwards


def global_hooks(group):
    """Hooks for all optimizers run on each part: every parameter is seen once, before and after its step."""
    model = net()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0)
    optimizer = OfItsOwn(model.parameters(), 0.1)
    ddp.step_in_backward(optimizer)
    seen = {"pre": [], "post": []}
    handles = [register(lambda o, args, kwargs, kind=kind: seen[kind].extend(p for g in o.param_groups for p in g["params"]))
               for kind, register in (("pre", register_optimizer_step_pre_hook), ("post", register_optimizer_step_post_hook))]
    ddp(torch.ones(3, 6)).sum().backward()
    for handle in handles:
        handle.remove()
    return [{id(p) for p in seen[kind]} == {id(p) for p in model.parameters()} for kind in seen], ddp.replicas_identical()


def test_global_hooks_see_every_part(on_ranks):
    assert on_ranks(2, global_hooks) == [([True, True], True)] * 2


class Around(torch.optim.Optimizer):
    def __init__(self, inside):
        self.inside = inside
        super().__init__(inside.param_groups, {})

    def step(self, closure=None):
        return self.inside.step(closure)


class Listed(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.every = list(self.param_groups[0]["params"])


def whole(group):
    model = net()
    ddp = DistributedDataParallel(model, process_group=group)
    patched = torch.optim.SGD(model.parameters(), 0.1)
    patched.step = types.MethodType(lambda self, closure=None: None, patched)
    scheduled = torch.optim.SGD(model.parameters(), 0.1)
    scheduled.step = types.MethodType(lambda self, closure=None: None, scheduled)
    lr_scheduler.StepLR(scheduled, 1)
    refused = [Around(torch.optim.SGD(model.parameters(), 0.1)), Listed(model.parameters(), 0.1), patched, scheduled]
    return [outcome_of(ddp.step_in_backward, optimizer) for optimizer in refused]


def test_what_reaches_all_parameters_is_refused_by_name(on_ranks):
    for outcomes in on_ranks(2, whole):
        assert [outcome.type for outcome in outcomes] == ["InvalidArgumentError"] * 4
        around, listed, patched, scheduled = (outcome.message for outcome in outcomes)
        assert "Around keeps an optimizer in its attribute 'inside'" in around
        assert "Listed keeps parameters in its attribute 'every'" in listed
        assert "SGD has a step() of its own on the object" in patched and patched == scheduled


def with_other_groups(group, overlap):
    """A layer is unfrozen and given to the optimizer, a new head takes the old one's place, the first group goes."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    ddp.step_in_backward(optimizer, overlap_forward=overlap)

    def moves():
        before = [p.clone() for p in model.parameters()]
        ddp(torch.randn(3, 6)).pow(2).sum().backward()
        ddp.finish_step()
        return [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)][::2]

    out = [moves()]
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    out.append(moves())
    model[2] = nn.Linear(6, 4)
    optimizer.param_groups[1]["params"] = list(model[2].parameters())
    out.append(moves())
    del optimizer.param_groups[0]
    out.append(moves())
    return out, ddp.replicas_identical()


@pytest.mark.parametrize("overlap", [False, True])
def test_groups_that_come_and_go(on_ranks, overlap):
    expected = [[False, True, True], [True, True, True], [True, True, True], [True, False, True]]
    assert on_ranks(2, with_other_groups, overlap) == [(expected, True)] * 2


def clipped_to(group, max_norm):
    model = net()
    ddp = DistributedDataParallel(model, process_group=group)
    return outcome_of(lambda: ddp.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1), max_norm=max_norm))


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_norm_that_is_none(on_ranks, max_norm):
    assert "max_norm is" in on_ranks(1, clipped_to, max_norm)[0].message
