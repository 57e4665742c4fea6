"""One rank of `unisono bench step`:  python -m unisono.bench.step_worker PLAN OUT

PLAN is JSON: {"model", "ways": [...], "optimize", "seconds", "rounds", "measure": "time" or "memory"}; rank 0 writes to OUT what
all ranks measured. All ways are trained in the same processes in turns: a burst of steps of each, all ranks
together, then the next; the order is turned by one in each round. The first step of a burst, with another model's data in the
caches, is not counted. A step lasts as long as on its slowest rank.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unisono.bench.memory import memory_now
from unisono.bench.models import MODELS
from unisono.bench.trainee import Groups, Trainee

_BURST_S = 0.25
_WARM_UP = 4  # the second step rebuilds the buckets


def timed_burst(trainee: Trainee, steps: int) -> list[float]:
    times = []
    clock = time.perf_counter
    dist.barrier()
    with trainee.context():
        trainee.step()
        for _ in range(steps):
            begin = clock()
            trainee.step()
            times.append(clock() - begin)
    return times


def agree_on_steps(seconds: float) -> int:
    """Steps of a burst, the same on all ranks, from how long one lasts."""
    slowest = torch.tensor([seconds])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(1, min(500, int(_BURST_S / slowest.item())))


def measure_time(plan: dict, groups: Groups) -> list[list[float]]:
    model = MODELS[plan["model"]]
    trainees = []
    for way in plan["ways"]:
        trainees.append(Trainee(model, way, groups, plan["optimize"]))
        check(trainees[-1], way, groups)
    steps, step_s = [], []
    for trainee in trainees:
        step_s.append(min(timed_burst(trainee, _WARM_UP)))
        steps.append(agree_on_steps(step_s[-1]))
    rounds = max(3, min(400, int(plan["seconds"] / (_BURST_S + 2 * max(step_s))))) if not plan["rounds"] else plan["rounds"]
    rounds = agree_on_rounds(rounds)
    samples = [[] for _ in trainees]
    order = list(range(len(trainees)))
    for _ in range(rounds):
        for i in order:
            samples[i] += timed_burst(trainees[i], steps[i])
        order = order[1:] + order[:1]
    return samples


def agree_on_rounds(rounds: int) -> int:
    box = [rounds]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check(trainee: Trainee, way: dict, groups: Groups) -> None:
    """One step whose gradients must be those of all ranks; for the ways that synchronise."""
    with trainee.context():
        trainee.backward()
        if way["impl"] not in ("no-sync", "bare") and not trainee.gradients_agree(groups):
            raise RuntimeError(f"{way['impl']}: gradients differ between ranks")
        trainee.finish()


def measure_memory(plan: dict, groups: Groups) -> dict[str, int]:
    """The most at any backward's end, when activations are gone and all gradients are there."""
    way, = plan["ways"]
    trainee = Trainee(MODELS[plan["model"]], way, groups, plan["optimize"])
    most: dict[str, int] = {}
    with trainee.context():
        for _ in range(6):
            trainee.backward()
            dist.barrier()
            for name, value in memory_now().items():
                most[name] = max(most.get(name, 0), value)
            trainee.finish()
    return most


def main() -> None:
    plan, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    groups = Groups()
    measured = (measure_memory if plan["measure"] == "memory" else measure_time)(plan, groups)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measured)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
