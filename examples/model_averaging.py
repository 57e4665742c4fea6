"""Why gradients are averaged and not parameters, in numbers.   unisono run -n 2 examples/model_averaging.py

A small net learns a fixed function of random inputs on all ranks. Ways: averaged gradients (DistributedDataParallel), and
parameters averaged every 1, 4 or 16 steps; with SGD, with momentum, with Adam. Against one process on the union batch:

- with SGD, averaging the parameters after every step is the same as averaging the gradients, up to rounding, and so it is with
  momentum, which is linear; between averages each rank goes its own way, and momentum carries it further;
- Adam divides by what it has seen of the gradients' sizes, which is each rank's own: even averaged after every step it is
  another optimizer;
- averaging parameters comes after the step: all of it is exposed, where gradients travel while backward runs.
"""

import time

import torch
import unisono
from torch import nn

STEPS, BATCH, WIDTH = 200, 16, 256
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.005, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 32, generator=generator)
        yield x, torch.sin(2 * x[:, :3].sum(1, keepdim=True))


def train(group, make, period):
    """The parameters in the end, and the seconds spent on communication that nothing hid. Period 0: averaged gradients."""
    model = net()
    averager = unisono.ParameterAverager(model, period, process_group=group) if period else None
    forward = model if period else unisono.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.1)
    optimizer = make(model.parameters())
    exposed = 0.0
    for x, y in batches(group.rank()):
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(x), y).backward()
        optimizer.step()
        if averager:
            begin = time.perf_counter()
            averager.step()
            exposed += time.perf_counter() - begin
        else:
            exposed += forward.stats.exposed_s
    return torch.cat([p.detach().flatten() for p in model.parameters()]), exposed


def alone(size, make):
    """One process on the union of all ranks' batches."""
    model = net()
    optimizer = make(model.parameters())
    for parts in zip(*(batches(rank) for rank in range(size)), strict=True):
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main():
    group = unisono.init()
    lines = []
    for name, make in OPTIMIZERS.items():
        reference = alone(group.size(), make)
        for period in (0, 1, 4, 16):
            parameters, exposed = train(group, make, period)
            away = ((parameters - reference).norm() / reference.norm()).item()
            way = f"parameters every {period}" if period else "gradients"
            lines.append(f"{name:9}  {way:20}  {away:12.2e}  {exposed / STEPS * 1e6:10.0f} µs")
    if group.rank() == 0:
        print("optimizer  averaged              from 1 process  exposed per step")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
