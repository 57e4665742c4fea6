"""Mixed precision, from Python: autocast, GradScaler, parameters kept in bf16, torch's own keyword."""

import pytest
import torch
import unisono
from ranks import outcome_of
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from unisono import DistributedDataParallel


def kept_in_bf16(group):
    net = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(net, process_group=group, mixed_precision=unisono.MixedPrecision(
        param=torch.bfloat16, reduce=torch.float32))
    value = 1.0 if group.rank() == 0 else 1 / 512
    ddp(torch.full((1, 4), value, dtype=torch.bfloat16)).sum().backward()
    return str(net.weight.dtype), str(net.weight.grad.dtype), net.weight.grad[0, 0].item(), ddp.bucket_sizes


def test_parameters_in_bf16_sums_in_f32(on_ranks):
    # (1 + 3 / 512) / 4 rounded once to bf16; the bucket holds four f32 in a cache line.
    assert on_ranks(4, kept_in_bf16) == [("torch.bfloat16", "torch.bfloat16", 0.251953125, [64])] * 4


def as_torch_means_it(group):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    ddp = DistributedDataParallel(net, process_group=group,
                                  mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                                                  buffer_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        out = ddp(torch.randn(6, 4))
        out.float().pow(2).mean().backward()
        optimizer.step()
    return str(out.dtype), {str(p.grad.dtype) for p in net.parameters()}, net[1].num_batches_tracked.item(), ddp.replicas_identical()


def test_torchs_keyword(on_ranks):
    assert on_ranks(2, as_torch_means_it) == [("torch.bfloat16", {"torch.float32"}, 3, True)] * 2


def test_another_keyword_is_refused():
    with pytest.raises(TypeError, match="mixed_precision is a str"):
        DistributedDataParallel(nn.Linear(1, 1), mixed_precision="bf16")


def scaled(group, scales, bad_step):
    torch.manual_seed(0)
    net = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[group.rank()], growth_interval=2)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(torch.full((1, 4), group.rank() + 1.0)).float().sum()
        if step == bad_step and group.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen, ddp.digest()


def test_infinities_are_seen_on_all_ranks(on_ranks):
    zero, one = on_ranks(2, scaled, [1024.0, 1024.0], 1)
    assert zero == one
    assert zero[0][1] == 512.0


def scaled_apart(group):
    return outcome_of(scaled, group, [1024.0, 2048.0], None)


def test_other_scales_are_named(on_ranks):
    for raised in on_ranks(2, scaled_apart):
        assert raised.type == "MismatchError" and "drifted apart" in raised.message and "'weight'" in raised.message


def not_finite(group):
    net = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(net, process_group=group, check_finite=True)
    x = torch.ones(1, 4)
    if group.rank() == 1:
        x[0, 2] = float("nan")
    return outcome_of(lambda: ddp(x).sum().backward())


def test_a_nan_is_named_with_its_rank(on_ranks):
    for raised in on_ranks(2, not_finite):
        assert "'weight'" in raised.message and "on rank 1," in raised.message
