"""Optimizer steps that are left to the next forward, from Python: over our groups and over Gloo."""

import io

import pytest
import torch
from ranks import outcome_of
from torch import nn
from torch_group import torch_group
from unisono import DistributedDataParallel


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4))


def train(group, overlap, steps=6, wrap=lambda module: module, between=lambda ddp, optimizer: None):
    """The digest after some steps with a learning rate that changes in each."""
    ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0)
    optimizer = torch.optim.AdamW(ddp.module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if overlap:
        ddp.step_in_backward(optimizer, overlap_forward=True)
    forward = wrap(ddp)
    torch.manual_seed(group.rank())
    for batch in torch.randn(steps, 5, 6):
        optimizer.zero_grad()
        forward(batch).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
        between(ddp, optimizer)
    return ddp.digest(), ddp.replicas_identical()


def both(group):
    return train(group, True), train(group, False)


def test_the_same_bits_as_afterwards(on_ranks):
    for overlapped, afterwards in on_ranks(2, both):
        assert overlapped == afterwards
        assert overlapped[1]


def over_gloo():
    with torch_group("gloo") as world:
        return both(world)


def test_over_gloo(on_ranks):
    for overlapped, afterwards in on_ranks(3, over_gloo, group=False):
        assert overlapped == afterwards
        assert overlapped[1]


def saved(group):
    """What is saved between backward and the next forward is the state after the step, whichever is saved first."""
    out = []
    for first in ("model", "optimizer"):
        states = []

        def save(ddp, optimizer, first=first, states=states):
            take = {"model": lambda: ddp.module.state_dict(), "optimizer": optimizer.state_dict}
            order = sorted(take, key=lambda name: name != first)
            files = {}
            for name in order:
                files[name] = io.BytesIO()
                torch.save(take[name](), files[name])
            states.append([torch.load(io.BytesIO(files[name].getvalue())) for name in ("model", "optimizer")])

        train(group, True, 2, between=save)
        train(group, False, 2, between=save)
        out.append(torch.equal(_flat(states[1]), _flat(states[3])))
    return out


def _flat(states):
    model, optimizer = states
    values = [v for v in model.values()]
    values += [v for _, state in sorted(optimizer["state"].items()) for v in state.values()]
    return torch.cat([v.double().flatten() for v in values])


def test_saved_between_steps(on_ranks):
    assert on_ranks(2, saved) == [[True, True]] * 2


def compiled(group, how):
    seen = []

    def wrap(ddp):
        if how == "inside":
            ddp.module.compile(backend="inductor")
            forward = ddp
        else:
            forward = torch.compile(ddp, backend="inductor")

        def evaluate(ddp, optimizer):
            with torch.no_grad():  # nothing but compiled kernels reads the parameters here
                seen.append(forward(torch.ones(3, 6)))

        ddp.evaluate = evaluate
        return forward

    results = []
    for overlap in (True, False):
        results.append(train(group, overlap, wrap=wrap, between=lambda ddp, optimizer: ddp.evaluate(ddp, optimizer)))
        torch._dynamo.reset()
    return results[0] == results[1], torch.equal(torch.stack(seen[:6]), torch.stack(seen[6:]))


@pytest.mark.parametrize("how", ["inside", "outside"])
def test_compiled(on_ranks, how):
    assert on_ranks(2, compiled, how) == [(True, True)] * 2


def failing(group):
    class Fails(torch.optim.SGD):
        fail = False

        def step(self, closure=None):
            if self.fail:
                raise RuntimeError("the optimizer has had enough")
            return super().step(closure)

    ddp = DistributedDataParallel(net(), process_group=group)
    optimizer = Fails(ddp.module.parameters(), 0.1)
    ddp.step_in_backward(optimizer, overlap_forward=True)
    ddp(torch.ones(3, 6)).sum().backward()
    ddp.finish_step()
    optimizer.__class__.fail = True
    out = outcome_of(lambda: ddp(ddp(torch.ones(3, 6)).sum().backward() or torch.ones(3, 6)))
    optimizer.__class__.fail = False
    return out.type, out.message


def test_an_optimizer_that_fails(on_ranks):
    for kind, message in on_ranks(2, failing):
        assert kind == "RuntimeError"
        assert "had enough" in message


def with_a_tensor_for_a_rate(group):
    """Schedulers write into such a rate where they assign to a number."""
    out = []
    for overlap in (True, False):
        ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0)
        optimizer = torch.optim.SGD(ddp.module.parameters(), lr=torch.tensor(0.1), foreach=False)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        ddp.step_in_backward(optimizer, overlap_forward=overlap)
        torch.manual_seed(group.rank())
        for batch in torch.randn(4, 5, 6):
            ddp(batch).pow(2).mean().backward()
            schedule.step()
        out.append((ddp.digest(), optimizer.param_groups[0]["lr"].item()))
    return out


def test_a_learning_rate_that_is_a_tensor(on_ranks):
    for overlapped, inside in on_ranks(2, with_a_tensor_for_a_rate):
        assert overlapped == inside
