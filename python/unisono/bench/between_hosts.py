"""`unisono bench hosts`, and one of its ranks:  python -m unisono.bench.between_hosts PLAN OUT"""

import json
import sys
import tempfile
import time
from pathlib import Path

from unisono.bench.hosts import EmulatedHosts
from unisono.bench.planned import rank_main, slowest
from unisono.bench.report import Report, row_of, show_bytes, show_seconds

SIZES = [4000, 1 << 20, 100_000_000]
BUCKET = 8 << 20  # bytes, of what is converted: one is on its way while the next is converted, as in a backward
MOVED = 25 << 20  # bytes, of the other calls: all ranks' shares together
OTHERS = ["broadcast", "all_gather", "reduce_scatter"]
IMPLS = ["gloo", "unisono over gloo", "unisono ordered", "unisono hierarchy", "unisono hierarchy, bf16"]


def run(options, report: Report) -> None:
    sizes = SIZES[:2] if options.quick else SIZES
    plan = {"sizes": sizes, "calls": [5 if options.quick else 41 if size < 1 << 24 else 7 for size in sizes],
            "moved": 1 << 20 if options.quick else MOVED, "moves": 3 if options.quick else 9}
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        plan_path, out = Path(folder, "plan.json"), Path(folder, "out.json")
        plan_path.write_text(json.dumps(plan))
        with EmulatedHosts(options.hosts, options.rate) as hosts:
            hosts.run([sys.executable, "-m", "unisono.bench.between_hosts", str(plan_path), str(out)], options.per_host)
        reduced, moved = json.loads(out.read_text())
    place = f"on {options.hosts} hosts of {options.per_host} ranks, {options.rate} each"

    def rows_of(op, size, impls, samples):
        rows = [row_of(s, bench="hosts", op=op, impl=impl, ranks=options.hosts * options.per_host, bytes=size,
                       more={"hosts": options.hosts, "rate": options.rate}) for impl, s in zip(impls, samples, strict=True)]
        report.rows += rows
        return [[row.impl, show_seconds(row.median_s), show_seconds(row.min_s), str(row.count),
                 f"{rows[0].median_s / row.median_s:.2f}x"] for row in rows]

    columns = ["impl", "median", "min", "calls", "faster than Gloo"]
    report.table(f"All-reduce of f32 {place}", ["size", *columns],
                 [[show_bytes(size), *line] for size, s in zip(sizes, reduced, strict=True)
                  for line in rows_of("all_reduce", size, IMPLS, s)])
    report.table(f"Other calls of torch.distributed, {show_bytes(plan['moved'])} in all {place}", ["op", *columns],
                 [[op, *line] for op, s in zip(OTHERS, moved, strict=True)
                  for line in rows_of(op, plan["moved"], ["gloo", "unisono"], s)])
    report.say("\nCalls in turns, one of each; a call lasts as long as on its slowest rank. bf16: converted to bf16, reduced, and back, "
               "in buckets of 8 MiB.")


def measure(plan: dict) -> tuple[list, list]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return reductions(plan), others(plan)


def timed(ways, calls: int) -> list[list[float]]:
    """Seconds of each call of each way, in turns."""
    import torch.distributed as dist

    samples = [[] for _ in ways]
    for call in range(calls + 1):
        for way, seconds in zip(ways, samples, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            way()
            if call > 0:
                seconds.append(time.perf_counter() - begin)
    return slowest(samples)


def others(plan: dict) -> list[list[list[float]]]:
    """Of OTHERS, each over Gloo and over the backend unisono."""
    import torch
    import torch.distributed as dist

    groups = [dist.new_group(backend=backend) for backend in ("gloo", "unisono")]
    size, rank = dist.get_world_size(), dist.get_rank()
    share = plan["moved"] // 4 // size
    whole, part = torch.ones(share * size), torch.full((share,), float(rank))
    calls = {"broadcast": lambda group: dist.broadcast(whole, 0, group=group),
             "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
             "reduce_scatter": lambda group: dist.reduce_scatter_tensor(torch.empty_like(part), whole, group=group)}
    return [timed([lambda call=calls[op], group=group: call(group) for group in groups], plan["moves"]) for op in OTHERS]


def reductions(plan: dict) -> list[list[list[float]]]:
    import torch
    import torch.distributed as dist

    import unisono
    from unisono import _C

    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo")
    flat, two_levels = _C.from_torch(dist.new_group(backend="gloo")), unisono.hierarchical()

    def plain(tensor):
        dist.all_reduce(tensor, group=gloo)
        tensor.div_(dist.get_world_size())

    def narrow(tensor):
        buckets = tensor.split(BUCKET // 4)
        halves = []
        for bucket in buckets:
            half = bucket.to(torch.bfloat16)
            halves.append((half, two_levels.all_reduce(half, "avg", True)))
        for bucket, (half, work) in zip(buckets, halves, strict=True):
            work.wait()
            bucket.copy_(half)

    ordered = unisono.ordered()
    ways = [plain, lambda t: flat.all_reduce(t, "avg").wait(), lambda t: ordered.all_reduce(t, "avg").wait(),
            lambda t: two_levels.all_reduce(t, "avg").wait(), narrow]
    out = []
    for size, calls in zip(plan["sizes"], plan["calls"], strict=True):
        tensors = [torch.full((size // 4,), float(dist.get_rank())) for _ in ways]
        samples = timed([lambda way=way, tensor=tensor: way(tensor) for way, tensor in zip(ways, tensors, strict=True)], calls)
        if not all(bool((tensor == (dist.get_world_size() - 1) / 2).all()) for tensor in tensors):
            raise RuntimeError("a wrong mean")
        out.append(samples)
    return out


if __name__ == "__main__":
    rank_main(measure)
