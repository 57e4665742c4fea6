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
