"""unisono.DistributedDataParallel: where replicas start, what groups it takes, and what else its surface promises."""

import json

import pytest
import torch
import unisono
from ranks import outcome_of
from small_models import TwoLayers, WithBuffer, linear, x_of
from torch import nn
from torch_group import torch_group
from unisono import DistributedDataParallel


def plain_steps(group, options):
    ddp = DistributedDataParallel(linear(), process_group=group, **options)
    out = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(group)).sum().backward()
        out.append(ddp.module.weight.grad.tolist())
    return out, ddp.replicas_identical(), ddp.digest()


@pytest.mark.parametrize("options", [
    {}, {"gradient_as_bucket_view": False}, {"overlap": False}, {"naive": True}, {"static_graph": True},
    {"find_unused_parameters": True}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 0.001},
], ids=str)
def test_mean_of_two_ranks(on_ranks, options):
    results = on_ranks(2, plain_steps, options)
    assert results[0][:2] == ([[[1.5] * 4]] * 3, True)
    assert results[0] == results[1]


def starts_as_rank_0(group):
    torch.manual_seed(group.rank())
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    before = model[0].weight.tolist()
    ddp = DistributedDataParallel(model, process_group=group)
    return before, model[0].weight.tolist(), ddp.digest()


def test_all_start_as_rank_0(on_ranks):
    (before_0, after_0, digest_0), (before_1, after_1, digest_1) = on_ranks(2, starts_as_rank_0)
    assert before_0 != before_1
    assert before_0 == after_0 == after_1
    assert digest_0 == digest_1


def of_default_group(group):
    return DistributedDataParallel(linear()).process_group is group


def test_the_newest_group_is_the_default(on_ranks):
    assert on_ranks(2, of_default_group) == [True, True]


def over_torch_groups(backend):
    with torch_group(backend) as world:
        x = torch.full((1, 4), world.rank() + 1.0)
        grads = []
        for group in (None, world):
            ddp = DistributedDataParallel(linear(), process_group=group)
            ddp(x).sum().backward()
            grads.append(ddp.module.weight.grad.tolist())
        stock = nn.parallel.DistributedDataParallel(linear())
        stock(x).sum().backward()
        return [*grads, stock.module.weight.grad.tolist()]


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_over_torch_distributed(on_ranks, backend):
    results = on_ranks(2, over_torch_groups, backend, group=False)
    assert results == [[[[1.5] * 4]] * 3] * 2


def buffer_at_start(group, options):
    module = WithBuffer(group.rank())
    ddp = DistributedDataParallel(module, process_group=group, **options)
    at_start = module.q.tolist()
    ddp(x_of(group)).sum().backward()
    module.q.fill_(10.0 + group.rank())
    ddp(x_of(group)).sum().backward()
    first = module.q.tolist()
    module.q.fill_(20.0 + group.rank())
    with ddp.no_sync():
        ddp(x_of(group))
    inside = module.q.tolist()
    ddp(x_of(group))
    return at_start, first, inside, module.q.tolist()


@pytest.mark.parametrize("options", [{"broadcast_buffers": False}, {"forward_sync_buffers": False}], ids=str)
def test_buffers_start_as_rank_0_without_the_broadcast_per_step(on_ranks, options):
    """E3."""
    results = on_ranks(2, buffer_at_start, options)
    assert [r[0] for r in results] == [[0.0]] * 2
    assert [r[1] for r in results] == [[10.0], [11.0]]


def test_buffers_follow_rank_0(on_ranks):
    for rank, (at_start, first, inside, after) in enumerate(on_ranks(2, buffer_at_start, {})):
        assert (at_start, first, inside, after) == ([0.0], [10.0], [20.0 + rank], [20.0])


def half_precision(group, dtype, small):
    layer = nn.Linear(2, 1, bias=False).to(dtype)
    ddp = DistributedDataParallel(layer, process_group=group)
    value = 1.0 if group.rank() == 0 else small
    ddp(torch.full((1, 2), value, dtype=dtype)).sum().backward()
    return layer.weight.grad.double().tolist()


@pytest.mark.parametrize("dtype, small", [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)], ids=str)
def test_half_precision_is_accumulated_in_f32(on_ranks, dtype, small):
    """E8: 1 and three times a quarter of its last place, a quarter of it all rounded once. In 16 bits it stays 0.25."""
    assert torch.ones((), dtype=dtype) + small == torch.ones((), dtype=dtype) + 2 * small == 1
    expected = torch.tensor((1 + 3 * small) / 4, dtype=torch.float64).to(dtype).item()
    assert expected != 0.25
    assert on_ranks(4, half_precision, dtype, small) == [[[expected] * 2]] * 4


def attributes(group):
    model = WithBuffer(3)
    model.note = "mine"
    ddp = DistributedDataParallel(model, process_group=group)
    missing = outcome_of(getattr, ddp, "nothing_like_it")
    ddp.eval()
    return ddp.note, ddp.q.item(), missing.type, missing.message, model.training


def test_attributes_fall_through_to_the_module(on_ranks):
    assert on_ranks(1, attributes) == [
        ("mine", 3.0, "AttributeError", "'WithBuffer' object has no attribute 'nothing_like_it'", False)]


def ignored(group):
    model = TwoLayers(use_a=True)
    ddp = DistributedDataParallel(model, process_group=group, parameters_and_buffers_to_ignore=["a.weight"])
    ddp(x_of(group)).sum().backward()
    return model.a.weight.grad[0, 0].item(), model.b.weight.grad[0, 0].item()


def test_ignored_parameters_stay_local(on_ranks):
    assert on_ranks(2, ignored) == [(1.0, 1.5), (2.0, 1.5)]


def bits_for_cap(group, cap):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    draw = torch.Generator().manual_seed(group.rank())
    for step in range(5):
        scale = 10.0 ** (3 * group.rank() - step)  # so that the order of summation matters
        optimizer.zero_grad()
        (ddp(torch.randn(16, 64, generator=draw)) * scale).sum().backward()
        optimizer.step()
    return ddp.digest()


def test_bucket_size_does_not_change_a_bit(on_ranks):
    """K2."""
    digests = {digest for cap in (1 / 1024, 1, 25) for _ in range(2) for digest in on_ranks(3, bits_for_cap, cap)}
    assert len(digests) == 1


def traced(group, path):
    ddp = DistributedDataParallel(linear(), process_group=group)
    ddp.set_tracing(True)
    ddp(x_of(group)).sum().backward()
    events = ddp.take_trace()
    unisono.write_chrome_trace(path, group.rank(), events)
    return sorted({event.category for event in events}), len(ddp.take_trace()), ddp.bucket_sizes


def test_trace(on_ranks, tmp_path):
    path = tmp_path / "trace.json"
    categories, left, sizes = on_ranks(1, traced, str(path))[0]
    assert categories == ["all-reduce", "buckets", "hooks", "steps"]
    assert left == 0
    assert sum(sizes) >= 16
    data = json.loads(path.read_text())
    assert (data["traceEvents"] if isinstance(data, dict) else data)
