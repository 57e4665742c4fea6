"""A group that unisono starts by itself, without torch.distributed: NCCL's on GPUs; under torchrun.

    torchrun --standalone --nproc-per-node 2 tests/gpu/own_group.py nccl      one GPU per rank
    torchrun --standalone --nproc-per-node 2 tests/gpu/own_group.py gloo      the same on CPUs
"""

import argparse
import os

import torch
import unisono
from torch import nn


def check_operations(group, device):
    rank, size = group.rank(), group.size()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        x = torch.full((100_000,), rank + 1, dtype=dtype, device=device)
        group.all_reduce(x, "sum").wait()
        assert (x == size * (size + 1) // 2).all(), (dtype, x)
    x = torch.full((1000,), float(rank), device=device)
    group.broadcast(x, size - 1).wait()
    assert (x == size - 1).all(), x
    group.barrier().wait()


def check_training(group, device):
    rank = group.rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
    ddp = unisono.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    torch.manual_seed(100 + rank)
    for _ in range(10):
        optimizer.zero_grad()
        ddp(torch.randn(16, 64, device=device)).pow(2).mean().backward()
        optimizer.step()
    assert ddp.replicas_identical()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("transport", choices=["nccl", "gloo"])
    transport = parser.parse_args().transport
    device = torch.device("cpu")
    if transport == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # before init: NCCL takes the thread's device
    group = unisono.init(transport)
    check_operations(group, device)
    check_training(group, device)
    print(f"rank {group.rank()} of {group.size()} on {device}: {group.name}, sums right, replicas equal")


if __name__ == "__main__":
    main()
