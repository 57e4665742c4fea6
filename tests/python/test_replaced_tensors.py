"""What counts is what a module has now: parameters, buffers and layers that took the place of others since the last forward."""

import pytest
import torch
import unisono
from ranks import outcome_of
from small_models import WithBuffer, linear, x_of
from torch import nn
from torch_group import torch_group
from unisono import DistributedDataParallel, SyncBatchNorm


def assigned(group, value):
    ddp = DistributedDataParallel(linear(), process_group=group)
    ddp(x_of(group)).sum().backward()
    before = ddp.digest()
    ddp.load_state_dict({"weight": torch.full((1, 4), value + group.rank())}, assign=True)
    return ddp, before


def looked_at(group):
    ddp, before = assigned(group, 5.0)
    return ddp.digest() != before, ddp.digest(), ddp.replicas_identical()


def test_a_digest_is_of_what_was_loaded(on_ranks):
    (new_0, digest_0, same_0), (new_1, digest_1, same_1) = on_ranks(2, looked_at)
    assert (new_0, new_1, same_0, same_1) == (True, True, False, False)
    assert digest_0 != digest_1


def moved(group):
    ddp, _ = assigned(group, 7.0)
    ddp.set_group(unisono.init(timeout=30, start_timeout=30))
    brought = ddp.module.weight.tolist()
    ddp(x_of(group)).sum().backward()
    return brought, ddp.module.weight.grad.tolist(), ddp.replicas_identical()


def test_another_group_gets_what_was_loaded(on_ranks):
    assert on_ranks(2, moved) == [([[7.0] * 4], [[1.5] * 4], True)] * 2


def moved_with_a_resized_buffer(group):
    module = WithBuffer(1, 2)
    ddp = DistributedDataParallel(module, process_group=group)
    ddp(x_of(group)).sum().backward()
    if group.rank() == 0:
        module.q = torch.arange(400.0)
        ddp.set_group(unisono.init(timeout=30, start_timeout=30))
    else:  # as a newcomer does
        del ddp
        ddp = DistributedDataParallel(WithBuffer(3, 400), process_group=unisono.init(timeout=30, start_timeout=30))
    for _ in range(2):
        ddp(x_of(group)).sum().backward()
    return ddp.module.q.tolist(), ddp.replicas_identical()


def test_another_group_agrees_on_a_resized_buffer(on_ranks):
    assert on_ranks(2, moved_with_a_resized_buffer) == [(torch.arange(400.0).tolist(), True)] * 2


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.steps = self.steps + 1
        return self.layer(x)


def joined(group, longest):
    ddp = DistributedDataParallel(Counts(), process_group=group)
    with ddp.join():
        for _ in range(5 if group.rank() == longest else 2):
            ddp(x_of(group)).sum().backward()
    return ddp.module.steps.item()


@pytest.mark.parametrize("longest", [0, 1])
def test_join_ends_with_an_assigned_buffer(on_ranks, longest):
    assert on_ranks(2, joined, longest) == [5.0, 5.0]


def averaged(group):
    module = nn.Sequential(linear(), nn.Linear(1, 1, bias=False))
    averager = unisono.ParameterAverager(module, 1, process_group=group)
    module[1] = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module[1].weight, float(group.rank()))
    averager.step()
    return module[1].weight.item()


def test_the_parameters_of_a_new_layer_are_averaged(on_ranks):
    assert on_ranks(2, averaged) == [0.5, 0.5]


def norm_goes_along(group, given):
    unisono.init(timeout=30, start_timeout=30)  # the default one, over which layers without a group run
    layer = SyncBatchNorm(1, process_group=group if given else None)
    old = group if given else unisono.group.existing(None)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 1), layer), process_group=old)
    new = unisono.init(timeout=30, start_timeout=30, prefix="another")
    old.abort("as if a rank had died")
    ddp.set_group(new)
    return outcome_of(lambda: ddp(torch.randn(3, 2)).sum().backward())


@pytest.mark.parametrize("given", [True, False])
def test_layers_over_the_old_group_run_over_the_new_one(on_ranks, given):
    assert on_ranks(2, norm_goes_along, given) == [None, None]


def overlapping_sub_groups():
    import torch.distributed as dist

    with torch_group("gloo", timeout=10) as world:
        rank = world.rank()
        first = dist.new_group([0, 1])
        dist.new_group([1, 2])  # rank 1 has one group more than the others
        if rank == 2:
            return None
        layer = SyncBatchNorm(1, affine=False, process_group=first)
        return layer(torch.tensor([[float(rank)], [rank + 2.0]])).flatten().tolist()


def test_sync_batch_norm_over_overlapping_sub_groups(on_ranks):
    zero, one, nobody = on_ranks(3, overlapping_sub_groups, group=False)
    normal = nn.BatchNorm1d(1, affine=False)(torch.tensor([[0.0], [2.0], [1.0], [3.0]])).flatten().tolist()
    assert nobody is None
    assert zero + one == pytest.approx(normal, abs=1e-6)  # the statistics are kept in f64 here, in f32 there


def conjugated(group):
    value = torch.tensor([1 + 2j, 3 + 4j]) * (group.rank() + 1)
    module = nn.Module()
    module.weight = nn.Parameter(value.clone().conj())
    module.register_buffer("table", value.clone().conj())
    ddp = DistributedDataParallel(module, process_group=group)
    refused = outcome_of(group.all_reduce, value.conj())
    return module.weight.tolist(), module.table.tolist(), ddp.replicas_identical(), refused.message


def test_what_is_conjugated_lazily(on_ranks):
    for weight, table, same, refused in on_ranks(2, conjugated):
        assert weight == table == [1 - 2j, 3 - 4j]
        assert same
        assert "resolve_conj" in refused


def copied(group):
    import copy

    module = nn.Sequential(linear(), linear())
    ddp = DistributedDataParallel(module, process_group=group, parameters_and_buffers_to_ignore=(n for n in ("1.weight",)))
    return sum(ddp.bucket_sizes), sum(copy.deepcopy(ddp).bucket_sizes)


def test_a_copy_ignores_the_same(on_ranks):
    (own, copy), _ = on_ranks(2, copied)
    assert own == copy
