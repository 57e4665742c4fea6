"""Gradient transforms and communication hooks, torch's own among them, from Python."""

import pytest
import torch
import torch.distributed as dist
import unisono
from ranks import outcome_of
from torch import nn
from unisono import DistributedDataParallel, transforms


class Given(nn.Module):
    """A parameter whose gradient is what forward is given."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def half(group, name):
    ddp = DistributedDataParallel(Given(4, 4), process_group=group)
    ddp.set_transform(getattr(transforms, name)())
    ddp(torch.full((4, 4), 40000.0)).backward()
    sent, large = ddp.stats.bytes, ddp.module.weight.grad.unique().tolist()
    ddp.set_transform(None)
    ddp.zero_grad()
    ddp(torch.full((4, 4), group.rank() + 1.0)).backward()
    return large, ddp.module.weight.grad[0, 0].item(), sent


@pytest.mark.parametrize("name, mean", [("f16", 40000.0), ("bf16", torch.tensor(40000.0).bfloat16().item())])
def test_a_sum_first_would_be_infinite(on_ranks, name, mean):
    """F3: 160000 is more than f16 can hold; bf16 could, and must come to the same."""
    assert on_ranks(4, half, name) == [([mean], 2.5, 32)] * 4


def yields(group, kind):
    ddp = DistributedDataParallel(Given(8), process_group=group)

    def hook(state, bucket):
        assert state == "mine"
        assert bucket.is_last() and bucket.index() == 0
        assert bucket.parameters()[0] is ddp.module.weight
        assert bucket.gradients()[0].shape == (8,)
        tensor = bucket.buffer().clone()
        group.all_reduce(tensor, "avg" if kind == "mean" else "sum").wait()
        future = torch.futures.Future()
        future.set_result(tensor)
        return future

    ddp.register_comm_hook("mine", hook, yields=kind)
    gradient, n = (torch.ones(8), 5) if group.rank() == 0 else (torch.full((8,), 10.0), 1)
    ddp(gradient).backward()
    plain = ddp.module.weight.grad[0].item()
    ddp.zero_grad()
    ddp.weight(ddp(gradient), n).backward()
    return plain, ddp.module.weight.grad[0].item()


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_a_hook_says_what_it_yields(on_ranks, kind):
    assert on_ranks(2, yields, kind) == [(5.5, 2.5)] * 2


def failing(group, how):
    ddp = DistributedDataParallel(Given(8), process_group=group)

    def hook(state, bucket):
        if group.rank() == 1 and how == "raises":
            raise RuntimeError("no such luck")
        if how == "no future":
            return bucket.buffer()
        future = torch.futures.Future()
        future.set_result(bucket.buffer()[:3] if how == "short" else bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    return outcome_of(lambda: ddp(torch.ones(8)).backward())


@pytest.mark.parametrize("how, said", [("raises", "no such luck"), ("no future", "instead of a torch.futures.Future"),
                                       ("short", "holds 3 numbers")])
def test_a_failing_hook_is_named_on_every_rank(on_ranks, how, said):
    for raised in on_ranks(2, failing, how):
        assert "Error" in raised.bases and "failed in bucket 0" in raised.message and said in raised.message


def over_torch(path, rank, size, backend):
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
    return dist.group.WORLD


def run_torch_hook(path, backend, name):
    import os

    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks,
        powerSGD_hook,
        quantization_hooks,
    )

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = over_torch(path, rank, size, backend)
    try:
        def state_of(params):
            if name == "powerSGD":
                return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2,
                                                   min_compression_rate=1)
            return group
        hook = {"allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook,
                "bf16": default_hooks.bf16_compress_hook, "powerSGD": powerSGD_hook.powerSGD_hook,
                "per_tensor": quantization_hooks.quantization_pertensor_hook}[name]
        results = []
        for wrapper in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
            torch.manual_seed(5)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
            ddp = wrapper(model, process_group=group)
            ddp.register_comm_hook(state_of(ddp), hook)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            torch.manual_seed(rank)
            batches = torch.randn(5, 3, 6)
            for batch in batches:
                optimizer.zero_grad()
                ddp(batch).pow(2).mean().backward()
                optimizer.step()
            results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return (results[0] - results[1]).abs().max().item(), results[0].tolist()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
@pytest.mark.parametrize("name", ["allreduce", "fp16", "powerSGD"])  # torch's bf16 hook asks for NCCL
def test_torchs_own_hooks_run_unchanged(on_ranks, tmp_path, backend, name):
    (difference, ours), (_, other) = on_ranks(2, run_torch_hook, str(tmp_path / "store"), backend, name, group=False)
    assert ours == other
    # Our buckets pad each gradient to 64 bytes, so that PowerSGD's random factors are drawn for other shapes of the bucket's
    # rest; all else computes the same numbers.
    assert difference == 0 if name != "powerSGD" else difference < 0.05


def power_sgd_state(group):
    ddp = DistributedDataParallel(Given(16, 12), process_group=group)
    transform = transforms.power_sgd(rank=1, start_step=0)
    ddp.set_transform(transform)
    ddp(torch.randn(16, 12)).backward()
    state = transform.state_dict()
    again = transforms.power_sgd(rank=1, start_step=0)
    again.load_state_dict(state)
    same = all(torch.equal(a, b) for a, b in zip(state.values(), again.state_dict().values(), strict=True))
    wrong = outcome_of(lambda: again.load_state_dict({"x": torch.zeros(1)}))
    return sorted(state), same, wrong.type


def test_state_of_power_sgd(on_ranks):
    assert on_ranks(2, power_sgd_state) == [(["error.weight", "right.weight"], True, "InvalidArgumentError")] * 2


def test_bad_arguments():
    with pytest.raises(unisono.InvalidArgumentError, match="rank is 0"):
        transforms.power_sgd(rank=0)
    with pytest.raises(unisono.InvalidArgumentError, match="start_step is -1"):
        transforms.post_local_sgd(-1)
    with pytest.raises(TypeError, match="not callable"):
        transforms.hook(None, 3)
    with pytest.raises(ValueError, match="mean"):
        transforms.hook(None, print, yields="median")
