"""`unisono bench torch-backend`, and one of its ranks:  python -m unisono.bench.torch_backend PLAN OUT"""

import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from unisono.bench.launch import run_to_end
from unisono.bench.models import MODELS, describe, gradient_bytes
from unisono.bench.planned import rank_main, trainee
from unisono.bench.report import Report, row_of, show_bytes, show_seconds

SIZES = [4 << 10, 25 << 20]  # of the larger of a call's two tensors
OPERATIONS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "unequal all_to_all", "send and recv"]
GOALS = {("all_reduce", 25 << 20): 2.5, ("all_reduce", 4 << 10): 5,
         **{(op, 25 << 20): 2 for op in ("broadcast", "all_gather", "reduce_scatter", "all_to_all")}}
BACKENDS = ["gloo", "unisono"]
_BURST_S = 0.02
_MODEL = "gpt"


def run(options, report: Report) -> None:
    plan = {"rounds": options.rounds or (2 if options.quick else 25), "sizes": SIZES[:1] if options.quick else SIZES,
            "steps": 2 if options.quick else 20, "model": "tiny" if options.quick else _MODEL}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            plan_path, out = Path(folder, "plan.json"), Path(folder, "out.json")
            plan_path.write_text(json.dumps(plan))
            run_to_end(ranks, "unisono.bench.torch_backend", plan_path, out)
            _report(report, ranks, plan, json.loads(out.read_text()))


def _report(report: Report, ranks: int, plan: dict, found: dict) -> None:
    lines = []
    for key, samples in found["calls"].items():
        op, size = key.split("/")
        gloo, ours = (row_of(samples[b], bench="torch-backend", op=op, impl=b, ranks=ranks, bytes=int(size)) for b in BACKENDS)
        report.rows += [gloo, ours]
        goal = GOALS.get((op, int(size)))
        lines.append([op, show_bytes(int(size)), show_seconds(gloo.median_s), show_seconds(ours.median_s), str(ours.count),
                      f"{gloo.median_s / ours.median_s:.3g}x", f"{gloo.min_s / ours.min_s:.3g}x", f"{goal}x" if goal else ""])
    report.table(f"Stock torch.distributed calls, {ranks} ranks of one host, f32",
                 ["operation", "bytes", "gloo", "unisono", "bursts", "faster", "by the minima", "goal"], lines)
    lines = []
    for what, samples in found["steps"].items():
        gloo, ours = (row_of(samples[b], bench="torch-backend", op=what, impl=b, ranks=ranks,
                             bytes=gradient_bytes(MODELS[plan["model"]])) for b in BACKENDS)
        report.rows += [gloo, ours]
        lines.append([what, show_seconds(gloo.median_s), show_seconds(ours.median_s), show_seconds(gloo.min_s),
                      show_seconds(ours.min_s), str(ours.count), f"{gloo.median_s / ours.median_s:.2f}x"])
    report.table(f"{ranks} ranks: steps of {plan['model']}, and making a group",
                 ["what", "gloo", "unisono", "gloo min", "unisono min", "count", "faster"], lines)
    report.say(f"\nMedians; in turns, each lasting as long as on its slowest rank. {plan['model']}: {describe(MODELS[plan['model']])}. "
               f"The loops are in Python, in the same processes.")


def _calls(op: str, size: int, group):
    """One call of an operation on tensors of its own."""
    import torch
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    count = size // 4 // world * world
    whole, part = torch.zeros(count), torch.zeros(count // world)
    other = torch.zeros(count)
    left = count // world // 2  # rank 0 gives this many less to its right neighbour, and more to itself
    sends = [count // world] * world
    takes = list(sends)
    if rank == 0:
        sends[0], sends[1] = sends[0] + left, sends[1] - left
        takes[0] += left
    elif rank == 1:
        takes[0] -= left
    unequal = torch.zeros(sum(takes))

    def messages():
        to, source = (rank + 1) % world, (rank - 1) % world
        works = [dist.isend(whole, to, group=group), dist.irecv(other, source, group=group)]
        for work in works:
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "unequal all_to_all": lambda: dist.all_to_all_single(unequal, whole, takes, sends, group=group),
        "send and recv": messages,
    }[op]


def _in_turns(ways: dict, rounds: int, bursts: bool = False) -> dict[str, list[float]]:
    """Seconds of a call of each way, on the slowest rank; in bursts of many calls where one is short."""
    import torch
    import torch.distributed as dist

    samples, calls = {name: [] for name in ways}, dict.fromkeys(ways, 1)
    order = list(ways)
    for round_number in range(-2, rounds):
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls[name]):
                ways[name]()
            seconds = torch.tensor([(time.perf_counter() - begin) / calls[name]], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if round_number >= 0:
                samples[name].append(seconds.item())
            elif bursts:
                calls[name] = max(1, min(2000, int(_BURST_S / seconds.item())))
        order = order[1:] + order[:1]
    return samples


def _fsdp(group):
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def wrap(module):
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in module.modules():
            if isinstance(layer, nn.TransformerEncoderLayer) or type(layer).__name__ == "Block":
                fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    return wrap


def _trainee(name: str, what: str, group):
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def sharded(module):
        wrapped = _fsdp(group)(module)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-7)

    def replicated(module):
        wrapped = torch.nn.parallel.DistributedDataParallel(module, process_group=group)
        return wrapped, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, process_group=group, lr=1e-7)

    return trainee(name, sharded if what == "FSDP2" else replicated)


def measure(plan: dict) -> dict:
    import torch
    import torch.distributed as dist

    import unisono  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    out = {"calls": {}, "steps": {}}
    for op in OPERATIONS:
        for size in plan["sizes"]:
            ways = {b: _calls(op, size, groups[b]) for b in BACKENDS}
            out["calls"][f"{op}/{size}"] = _in_turns(ways, plan["rounds"], bursts=True)
    for what in ("FSDP2", "stock DDP and ZeroRedundancyOptimizer"):
        ways = {b: _trainee(plan["model"], what, groups[b]) for b in BACKENDS}
        out["steps"][what] = _in_turns(ways, plan["steps"])
    made = []
    ways = {b: lambda b=b: made.append(dist.new_group(backend=b)) for b in BACKENDS}
    out["steps"]["new_group"] = _in_turns(ways, min(plan["rounds"], 10))
    return out


if __name__ == "__main__":
    rank_main(measure)
