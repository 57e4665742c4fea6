"""What torch builds on a backend, run on ours: FSDP2, ZeroRedundancyOptimizer, DeviceMesh, DTensor, distributed checkpoints. The same
numbers as on Gloo."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_group import torch_group


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5))


def train(model, optimizer, steps=4):
    torch.manual_seed(20 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 12)).pow(2).mean().backward()
        optimizer.step()


def fsdp2(backend):
    with torch_group(backend):
        model = model_of()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        train(model, torch.optim.AdamW(model.parameters(), 0.01))
        return [p.full_tensor().detach() for p in model.parameters()]


def zero(backend):
    with torch_group(backend) as world:
        model = nn.parallel.DistributedDataParallel(model_of())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=world, lr=0.01)
        train(model, optimizer)
        return [p.detach() for p in model.parameters()]


def hybrid(backend):
    """FSDP2 with replicas: a mesh of two dimensions, whose groups the mesh makes."""
    with torch_group(backend):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(model_of(), mesh=mesh)
        train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        return [p.full_tensor().detach() for p in model.parameters()]


def tensors(backend):
    with torch_group(backend):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = torch.arange(42.0).view(7, 6)  # seven rows: shards of different sizes
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        other = sharded.redistribute(mesh, [Shard(1)])
        product = sharded.t() @ sharded
        return [other.to_local(), other.redistribute(mesh, [Replicate()]).to_local(), product.full_tensor(),
                sharded.full_tensor()]


@pytest.mark.parametrize("program, size", [(fsdp2, 2), (fsdp2, 3), (zero, 2), (hybrid, 4), (tensors, 2), (tensors, 3)])
def test_the_same_numbers_as_on_gloo(on_ranks, program, size):
    ours = on_ranks(size, program, "unisono", group=False)
    theirs = on_ranks(size, program, "gloo", group=False)
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            if size == 2:  # a sum of two has one order
                assert torch.equal(a, b)
            else:  # Gloo adds in a ring, we in a tree: float32 rounding, through four optimizer steps
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def checkpoint(path, backend):
    with torch_group(backend):
        model = fully_shard(model_of())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        train(model, optimizer)
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
        train(model, optimizer)
        expected = [p.full_tensor().detach() for p in model.parameters()]

        again = fully_shard(model_of())
        optimizer = torch.optim.AdamW(again.parameters(), 0.01)
        states = get_state_dict(again, optimizer)
        dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
        set_state_dict(again, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        train(again, optimizer)
        return all(torch.equal(p.full_tensor().detach(), e) for p, e in zip(again.parameters(), expected, strict=True))


def test_distributed_checkpoints(on_ranks, tmp_path):
    assert on_ranks(2, checkpoint, str(tmp_path / "checkpoint"), "unisono", group=False) == [True, True]
    assert os.listdir(tmp_path / "checkpoint")


def mixed_backends():
    with torch_group("cpu:unisono"):
        t = torch.ones(3)
        dist.all_reduce(t)
        return t.tolist(), dist.get_backend_config()


def test_named_for_the_cpu_alone(on_ranks):
    for values, config in on_ranks(2, mixed_backends, group=False):
        assert values == [2.0] * 3 and "cpu:unisono" in config
