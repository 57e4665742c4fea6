"""Benchmarks whose ranks read a plan from one file and write what they measured to another."""

import json
import sys
from pathlib import Path


def rank_main(measure) -> None:
    """One rank:  python -m MODULE PLAN OUT.  `measure(plan)` makes torch.distributed's default group and returns the same on all ranks."""
    import torch.distributed as dist

    measured = measure(json.loads(Path(sys.argv[1]).read_text()))
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def slowest(samples: list[list[float]]) -> list[list[float]]:
    """The longest time over ranks, of each call of each way. Collective."""
    import torch.distributed as dist

    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    return [[max(call) for call in zip(*way, strict=True)] for way in zip(*everyone, strict=True)]


def trainee(name: str, wrap):
    """The step of a model of its own. `wrap(module)` returns what is called in its place, and the optimizer."""
    import torch
    import torch.distributed as dist

    from unisono.bench.models import MODELS

    model = MODELS[name]
    torch.manual_seed(1)
    module = model.make()
    wrapped, optimizer = wrap(module)
    torch.manual_seed(100 + dist.get_rank())
    batch = model.batch()

    def step():
        model.loss(wrapped, *batch).backward()
        optimizer.step()
        module.zero_grad(set_to_none=True)

    return step
