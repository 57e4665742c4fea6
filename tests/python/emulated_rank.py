"""One rank of test_emulated_hosts.py: trains until it is told to end, or fails; exit code 7 when a call failed."""

import argparse
import sys
import time

import torch
import unisono

parser = argparse.ArgumentParser()
parser.add_argument("timeout", type=float)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--slow", type=int, default=-1, help="this rank takes half a second longer in every other step")
options = parser.parse_args()

torch.set_num_threads(1)
group = unisono.init(timeout=options.timeout, start_timeout=60)
assert group.name.startswith("hierarchy"), group.name
torch.manual_seed(0)
ddp = unisono.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(8)]), process_group=group,
                                      bucket_cap_mb=2)
optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
try:
    for step in range(options.steps):
        optimizer.zero_grad()
        if group.rank() == options.slow and step % 2:
            time.sleep(0.5)
        ddp(torch.randn(4, 600)).pow(2).mean().backward()
        optimizer.step()
        print(f"step {step}", flush=True)
except unisono.Error as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(7)
