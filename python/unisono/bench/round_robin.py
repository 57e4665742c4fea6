"""`unisono bench round-robin`, and one of its ranks:  python -m unisono.bench.round_robin PLAN OUT"""

import json
import sys
import tempfile
import time
from pathlib import Path

from unisono.bench.hosts import EmulatedHosts
from unisono.bench.launch import run_to_end
from unisono.bench.models import MODELS, describe, gradient_bytes
from unisono.bench.planned import rank_main, slowest, trainee
from unisono.bench.report import Report, row_of, show_bytes, show_seconds

BYTES = 25 << 20
BUCKETS = 10
_CAP_MB = 2.5  # of a bucket of the models
_WARM_UP = 3  # the second step rebuilds the buckets


def run(options, report: Report) -> None:
    model = MODELS[options.model]
    plan = {"groups": options.groups, "model": options.model, "bytes": BYTES // 10 if options.quick else BYTES,
            "rounds": options.rounds or (3 if options.quick else 40)}
    ranks = options.ranks
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        plan_path, out = Path(folder, "plan.json"), Path(folder, "out.json")
        plan_path.write_text(json.dumps(plan))
        if options.rate:
            with EmulatedHosts(ranks, options.rate) as hosts:
                hosts.run([sys.executable, "-m", "unisono.bench.round_robin", str(plan_path), str(out)])
        else:
            run_to_end(ranks, "unisono.bench.round_robin", plan_path, out)
        reduced, stepped = json.loads(out.read_text())
    where = f"{ranks} hosts of one rank, {options.rate} each" if options.rate else f"{ranks} ranks on one host"
    _report(report, f"All-reduce of {show_bytes(plan['bytes'])} in {BUCKETS} buckets, {where}", "gloo", options.groups, reduced,
            bench="round-robin", op="all_reduce", ranks=ranks, bytes=plan["bytes"])
    _report(report, f"Training steps of {options.model}, buckets of {_CAP_MB} MB, {where}", "torch-ddp-gloo", options.groups, stepped,
            bench="round-robin-step", model=options.model, ranks=ranks, bytes=gradient_bytes(model))
    report.say(f"\nIn turns, one of each, the order turned by one in each round; each lasts as long as on its slowest rank. "
               f"{options.model}: {describe(model)}. "
               f"\"gloo\" and \"torch-ddp-gloo\" use one group of torch.distributed and its own wrapper, the others unisono over "
               f"as many Gloo groups as they say.")


def _report(report: Report, title: str, rival: str, groups: list[int], samples: list[list[float]], **values) -> None:
    rows = [row_of(s, impl=impl, **values)
            for impl, s in zip([rival, *(f"round-robin of {k}" for k in groups)], samples, strict=True)]
    report.rows += rows
    one = rows[1]
    report.table(title, ["impl", "median", "min", "count", f"times faster than {one.impl}", "by the minima"],
                 [[row.impl, show_seconds(row.median_s), show_seconds(row.min_s), str(row.count),
                   f"{one.median_s / row.median_s:.2f}x", f"{one.min_s / row.min_s:.2f}x"] for row in rows])


def _in_turns(ways, rounds: int) -> list[list[float]]:
    """Seconds of each way, call by call, on this rank."""
    import torch.distributed as dist

    samples = [[] for _ in ways]
    order = list(range(len(ways)))
    for round_number in range(-_WARM_UP, rounds):
        for i in order:
            dist.barrier()
            begin = time.perf_counter()
            ways[i]()
            if round_number >= 0:
                samples[i].append(time.perf_counter() - begin)
        order = order[1:] + order[:1]
    return samples


def measure(plan: dict) -> list[list[list[float]]]:
    import torch
    import torch.distributed as dist

    import unisono

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    robins = [unisono.round_robin([dist.new_group(backend="gloo") for _ in range(k)]) for k in plan["groups"]]
    gloo = dist.new_group(backend="gloo")
    size = dist.get_world_size()
    count = plan["bytes"] // 4 // BUCKETS

    def buckets():
        return [torch.full((count,), 1.0) for _ in range(BUCKETS)]

    def plainly(tensors):
        for work in [dist.all_reduce(t, op=dist.ReduceOp.SUM, group=gloo, async_op=True) for t in tensors]:
            work.wait()

    def through(group, tensors):
        for work in [group.all_reduce(t, "avg") for t in tensors]:
            work.wait()

    plain, averaged = buckets(), [buckets() for _ in robins]
    ways = [lambda: (plainly(plain), [t.div_(size) for t in plain]),
            *(lambda g=g, t=t: through(g, t) for g, t in zip(robins, averaged, strict=True))]
    reduced = _in_turns(ways, plan["rounds"])
    if not all(bool((t == 1).all()) for tensors in [plain, *averaged] for t in tensors):
        raise RuntimeError("a wrong mean")
    stepped = _in_turns([_trainee(plan["model"], gloo, torch.nn.parallel.DistributedDataParallel),
                         *(_trainee(plan["model"], g, unisono.DistributedDataParallel) for g in robins)], plan["rounds"])
    return [slowest(reduced), slowest(stepped)]


def _trainee(name: str, group, wrapper):
    import torch

    return trainee(name, lambda module: (wrapper(module, process_group=group, bucket_cap_mb=_CAP_MB),
                                         torch.optim.SGD(module.parameters(), lr=1e-7)))


if __name__ == "__main__":
    rank_main(measure)
