"""Optimizers inside backward, from Python."""

import pytest
import torch
from ranks import outcome_of
from torch import nn
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
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, gamma=0.5)
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
