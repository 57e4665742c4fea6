"""Our wrapper over NCCL against torch's, with mixed dtypes, accumulation and buckets that overlap backward; under torchrun.

    torchrun --standalone --nproc-per-node 2 tests/gpu/wrapper_on_devices.py --device cuda      one GPU per rank
    torchrun --standalone --nproc-per-node 2 tests/gpu/wrapper_on_devices.py --device cpu       the same over Gloo
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import unisono
from torch import nn


def model_on(device):
    torch.manual_seed(1)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers, nn.BatchNorm1d(512), nn.Linear(512, 10)).to(device)


def train(wrapper, device, steps, **options):
    model = model_on(device)
    ddp = wrapper(model, bucket_cap_mb=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        for last in (False, True):
            with contextlib.nullcontext() if last else ddp.no_sync():
                ddp(torch.randn(32, 512, device=device)).float().pow(2).mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ours = train(unisono.DistributedDataParallel, device, options.steps)
    theirs = train(nn.parallel.DistributedDataParallel, device, options.steps)
    everyone = [torch.zeros_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ours)
    assert all(torch.equal(everyone[0], other) for other in everyone), "the replicas differ"
    # Buckets of other bounds are other messages, and the engine's order of sums follows those.
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}: replicas equal, torch's to {(ours - theirs).abs().max():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
