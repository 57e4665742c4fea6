"""Nothing grows from step to step."""

import gc

import torch
import unisono
from torch import nn
from unisono import DistributedDataParallel


def private_kib():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("Private_Dirty", "Private_Clean")))


def many_steps(group, transform):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0)
    if transform:
        ddp.set_transform(getattr(unisono.transforms, transform)())
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    x = torch.randn(8, 16)
    sizes = []
    for step in range(10_001):
        optimizer.zero_grad()
        if step % 7 == 0:
            with ddp.no_sync():
                ddp(x).sum().backward()
        ddp(x).sum().backward()
        optimizer.step()
        if step % 2000 == 0:
            gc.collect()
            sizes.append(private_kib())
    return sizes


def test_ten_thousand_steps(on_ranks):
    for sizes in on_ranks(2, many_steps, None):
        # From step 2,000, when every cache is warm, to 10,000: one byte a step would be 8 KiB. malloc moves by a few pages.
        assert sizes[-1] - sizes[1] <= 256, sizes


def test_ten_thousand_steps_with_a_transform(on_ranks):
    for sizes in on_ranks(2, many_steps, "power_sgd"):
        assert sizes[-1] - sizes[1] <= 256, sizes
