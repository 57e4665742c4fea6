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
IMPLS = ["gloo", "unisono over gloo", "unisono ordered", "unisono hierarchy", "unisono hierarchy, bf16"]


def run(options, report: Report) -> None:
    sizes = SIZES[:2] if options.quick else SIZES
    plan = {"sizes": sizes, "calls": [5 if options.quick else 41 if size < 1 << 24 else 7 for size in sizes]}
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        plan_path, out = Path(folder, "plan.json"), Path(folder, "out.json")
        plan_path.write_text(json.dumps(plan))
        with EmulatedHosts(options.hosts, options.rate) as hosts:
            hosts.run([sys.executable, "-m", "unisono.bench.between_hosts", str(plan_path), str(out)], options.per_host)
        samples = json.loads(out.read_text())
    lines = []
    for size, of_size in zip(sizes, samples, strict=True):
        rows = [row_of(s, bench="hosts", op="all_reduce", impl=impl, ranks=options.hosts * options.per_host, bytes=size,
                       more={"hosts": options.hosts, "rate": options.rate}) for impl, s in zip(IMPLS, of_size, strict=True)]
        report.rows += rows
        lines += [[show_bytes(size), row.impl, show_seconds(row.median_s), show_seconds(row.min_s), str(row.count),
                   f"{rows[0].median_s / row.median_s:.2f}x"] for row in rows]
    report.table(f"All-reduce of f32 on {options.hosts} hosts of {options.per_host} ranks, {options.rate} each",
                 ["size", "impl", "median", "min", "calls", "faster than Gloo"], lines)
    report.say("\nCalls in turns, one of each; a call lasts as long as on its slowest rank. bf16: converted to bf16, reduced, and back.")


def measure(plan: dict) -> list[list[list[float]]]:
    import torch
    import torch.distributed as dist

    import unisono
    from unisono import _C

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gloo = dist.new_group(backend="gloo")
    flat, two_levels = _C.from_torch(dist.new_group(backend="gloo")), unisono.hierarchical()

    def plain(tensor):
        dist.all_reduce(tensor, group=gloo)
        tensor.div_(dist.get_world_size())

    def narrow(tensor):
        half = tensor.to(torch.bfloat16)
        two_levels.all_reduce(half, "avg", True).wait()
        tensor.copy_(half)

    ordered = unisono.ordered()
    ways = [plain, lambda t: flat.all_reduce(t, "avg").wait(), lambda t: ordered.all_reduce(t, "avg").wait(), lambda t: two_levels.all_reduce(t, "avg").wait(), narrow]
    out = []
    for size, calls in zip(plan["sizes"], plan["calls"], strict=True):
        tensors = [torch.full((size // 4,), float(dist.get_rank())) for _ in ways]
        samples = [[] for _ in ways]
        for call in range(calls + 1):
            for way, tensor, seconds in zip(ways, tensors, samples, strict=True):
                dist.barrier()
                begin = time.perf_counter()
                way(tensor)
                if call > 0:
                    seconds.append(time.perf_counter() - begin)
        if not all(bool((tensor == (dist.get_world_size() - 1) / 2).all()) for tensor in tensors):
            raise RuntimeError("a wrong mean")
        out.append(slowest(samples))
    return out


if __name__ == "__main__":
    rank_main(measure)
