"""`unisono bench step`."""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from unisono.bench.hosts import EmulatedHosts
from unisono.bench.launch import BenchError, run_to_end
from unisono.bench.models import MODELS, describe, gradient_bytes
from unisono.bench.report import Report, Row, row_of, show_mib, show_seconds

WAYS = [{"impl": impl} for impl in ("unisono-ddp", "torch-ddp-gloo", "torch-ddp-unisono", "no-sync", "bare")]
MEMORY_WAYS = [
    {"impl": "unisono-ddp"}, {"impl": "torch-ddp-gloo"},
    {"impl": "torch-ddp-gloo", "label": "torch-ddp-gloo, views", "options": {"gradient_as_bucket_view": True}},
    {"impl": "torch-ddp-unisono"}, {"impl": "bare"},
]
CAPS = [0, 1 / 64, 1 / 4, 1, 5, 25, 100]
DEFAULT_MODELS = ["mlp", "tiny", "gpt", "params1000"]
GOALS = {"mlp": 8, "tiny": 30, "gpt": 3, "params1000": 35}  # percent of exposed cost, 2 ranks
PARTS = ["step", "memory", "reducer", "buckets", "scaling", "features", "slow-link"]
FEATURES = {  # model: torch's options for it to be right; None: the defaults are
    "params10000": None, "unused30": {"find_unused_parameters": True}, "gpt": None, "layerdrop": {"find_unused_parameters": True},
}


def run(options, report: Report) -> None:
    options.seconds = options.seconds or (0.5 if options.quick else 8)
    parts = options.parts or (["step"] if options.quick else PARTS[:3])
    models = options.models or (["tiny"] if options.quick else DEFAULT_MODELS)
    for names, known in ((parts, PARTS), (models, list(MODELS))):
        if unknown := [name for name in names if name not in known]:
            raise BenchError(f"{', '.join(unknown)}: unknown; there are {', '.join(known)}")
    report.say("\n" + "\n".join(f"- {name}: {describe(MODELS[name])}" for name in models)
               + "\n\nA step is forward, backward, SGD step, zero_grad(set_to_none=True); one thread per rank.")
    makers = {"step": _steps, "memory": _memory, "reducer": _reducer, "buckets": _buckets, "scaling": _scaling,
              "features": _features, "slow-link": _slow_link}
    for part in parts:
        makers[part](options, models, report)
    _join_memory(report.rows)


def _train(ranks: int, model: str, ways: list[dict], options, measure: str = "time", optimize: bool = True, hosts=None):
    """What each rank measured, in rank order. `hosts`: one rank on each of these."""
    plan = {"model": model, "ways": ways, "optimize": optimize, "seconds": options.seconds, "measure": measure,
            "rounds": 2 if options.quick else None}
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        plan_path, out = Path(folder, "plan.json"), Path(folder, "out.json")
        plan_path.write_text(json.dumps(plan))
        if hosts:
            hosts.run([sys.executable, "-m", "unisono.bench.step_worker", str(plan_path), str(out)])
        else:
            run_to_end(ranks, "unisono.bench.step_worker", plan_path, out)
        return json.loads(out.read_text())


def _times(ranks: int, model: str, ways: list[dict], options, optimize: bool = True, hosts=None) -> list[list[float]]:
    """Per way, the steps' seconds, each on its slowest rank."""
    everyone = _train(ranks, model, ways, options, optimize=optimize, hosts=hosts)
    return [[max(step) for step in zip(*one_way, strict=True)] for one_way in zip(*everyone, strict=True)]


def _steps(options, models: list[str], report: Report) -> None:
    for ranks in options.ranks:
        lines = []
        for model in models:
            print(f"  {model}, {ranks} ranks ...", file=sys.stderr, flush=True)
            samples = _times(ranks, model, WAYS, options)
            rows = [row_of(s, bench="step" if way["impl"] != "bare" else "step-bare", model=model, ranks=ranks,
                           impl=way["impl"] if way["impl"] != "bare" else "no-sync", bytes=gradient_bytes(MODELS[model]))
                    for way, s in zip(WAYS, samples, strict=True)]
            report.rows += rows
            alone = next(row for row, way in zip(rows, WAYS, strict=True) if way["impl"] == "no-sync")
            for row, way in zip(rows, WAYS, strict=True):
                goal = f"{GOALS[model]}%" if way["impl"] == "unisono-ddp" and ranks == 2 and model in GOALS else ""
                exposed = "" if way["impl"] == "no-sync" else f"{100 * (row.median_s / alone.median_s - 1):+.1f}%"
                best = "" if way["impl"] == "no-sync" else f"{100 * (row.min_s / alone.min_s - 1):+.1f}%"
                lines.append([model, way["impl"], show_seconds(row.median_s), show_seconds(row.min_s), str(row.count),
                              exposed, best, goal])
        report.table(f"Training steps, {ranks} ranks",
                     ["model", "impl", "median", "min", "steps", "exposed cost", "of the minima", "goal"], lines)
    report.say("\nExposed cost: against the same step in no_sync of our wrapper. torch's wrapper as users have it, that is with "
               "gradient_as_bucket_view=False. bare: the module without any wrapper.")


def _memory(options, models: list[str], report: Report) -> None:
    ranks = options.ranks[0]
    lines = []
    with _steady_malloc():
        for model in models:
            for way in MEMORY_WAYS[:2] if options.quick else MEMORY_WAYS:
                everyone = _train(ranks, model, [way], options, "memory")
                pss, data = (max(rank[name] for rank in everyone) for name in ("pss", "data"))
                lines.append([model, way.get("label", way["impl"]), show_mib(pss), show_mib(data)])
                report.rows.append(Row("memory", way["impl"] if way["impl"] != "bare" else "no-sync", ranks,
                                       gradient_bytes(MODELS[model]), 0.0, 0.0, 6, pss, model=model,
                                       variant=way.get("label"), more={"data_bytes": data}))
    report.table(f"Memory of a rank at the end of a backward, {ranks} ranks",
                 ["model", "impl", "PSS", "of that, not a file's"], lines)
    report.say("\nOne way per process, the most of six steps and of the ranks. PSS counts the libraries' code by share, which "
               "depends on who else runs; the last column does not.")


@contextlib.contextmanager
def _steady_malloc():
    """glibc gives large blocks back at once instead of learning thresholds on the way, so that runs can be compared."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    try:
        yield
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def _join_memory(rows: list[Row]) -> None:
    memory = {(row.model, row.impl, row.ranks): row.peak_rss for row in rows if row.bench == "memory" and not row.variant}
    for row in rows:
        if row.bench == "step":
            row.peak_rss = memory.get((row.model, row.impl, row.ranks))


def _reducer(options, _models: list[str], report: Report) -> None:
    ways = [{"impl": impl} for impl in ("unisono-ddp", "torch-ddp-gloo", "no-sync", "bare")]
    lines = []
    for model in ("params1000", *(() if options.quick else ("params10000",))):
        parameters = int(model.removeprefix("params"))
        samples = _times(1, model, ways, options, optimize=False)
        rows = [row_of(s, bench="reducer", model=model, impl=way["impl"], ranks=1, bytes=gradient_bytes(MODELS[model]))
                for way, s in zip(ways, samples, strict=True)]
        report.rows += rows
        bare = rows[-1]
        for row in rows:
            cost = (row.median_s - bare.median_s) / parameters * 1e6
            least = (row.min_s - bare.min_s) / parameters * 1e6
            lines.append([model, row.impl, show_seconds(row.median_s), show_seconds(row.min_s), str(row.count),
                          f"{cost:.2f} µs", f"{least:.2f} µs"])
    report.table("The reducer alone, a world of one: forward, backward, zero_grad",
                 ["model", "impl", "median", "min", "steps", "per parameter", "of the minima"], lines)


def _buckets(options, models: list[str], report: Report) -> None:
    ways = [{"impl": "unisono-ddp", "label": f"bucket_cap_mb={cap:g}", "options": {"bucket_cap_mb": cap}} for cap in CAPS]
    ways += [{"impl": "unisono-ddp", "label": "default (25, first 1)"},
             {"impl": "unisono-ddp", "label": "default, overlap=False", "options": {"overlap": False}},
             {"impl": "unisono-ddp", "label": "naive", "options": {"naive": True}},
             {"impl": "torch-ddp-gloo", "label": "torch-ddp-gloo"}, {"impl": "no-sync", "label": "no-sync"}]
    ranks = options.ranks[0]
    for model in models:
        samples = _times(ranks, model, ways, options)
        rows = [row_of(s, bench="buckets", model=model, impl=way["impl"], ranks=ranks, variant=way["label"],
                       bytes=gradient_bytes(MODELS[model])) for way, s in zip(ways, samples, strict=True)]
        report.rows += rows
        report.table(f"Step time against buckets: {model}, {ranks} ranks",
                     ["way", "median", "min", "steps", "exposed cost"],
                     [[row.variant, show_seconds(row.median_s), show_seconds(row.min_s), str(row.count),
                       f"{100 * (row.median_s / rows[-1].median_s - 1):+.1f}%"] for row in rows])


def _features(options, _models: list[str], report: Report) -> None:
    ranks = options.ranks[0]
    lines = []
    for model, needed in FEATURES.items():
        ways = [{"impl": "unisono-ddp", "label": "unisono-ddp"},
                {"impl": "unisono-ddp", "label": "unisono-ddp, find-unused", "options": {"find_unused_parameters": True}},
                {"impl": "unisono-ddp", "label": "unisono-ddp, static graph", "options": {"static_graph": True}},
                {"impl": "unisono-ddp", "label": "unisono-ddp, bf16", "options": {"transform": "bf16"}},
                {"impl": "torch-ddp-gloo", "label": "torch-ddp-gloo" + (", find-unused" if needed else ""),
                 "options": needed or {}},
                {"impl": "no-sync", "label": "no-sync"}]
        if needed is None:
            ways.insert(5, {"impl": "torch-ddp-gloo", "label": "torch-ddp-gloo, static graph", "options": {"static_graph": True}})
        samples = _times(ranks, model, ways, options)
        rows = [row_of(s, bench="features", model=model, impl=way["impl"], ranks=ranks, variant=way["label"],
                       bytes=gradient_bytes(MODELS[model])) for way, s in zip(ways, samples, strict=True)]
        report.rows += rows
        lines += [[model, row.variant, show_seconds(row.median_s), show_seconds(row.min_s), str(row.count),
                   f"{100 * (row.median_s / rows[-1].median_s - 1):+.1f}%"] for row in rows]
    report.table(f"Many parameters, unused ones, dropped layers, {ranks} ranks",
                 ["model", "way", "median", "min", "steps", "exposed cost"], lines)
    report.say("\nOn one host bytes cost little and bf16's conversions are all that shows; it is meant for slow links.")


def _slow_link(options, models: list[str], report: Report) -> None:
    """Two hosts joined by a shaped link, Gloo between them."""
    ours, views = {"over_gloo": True, "bucket_cap_mb": 2}, {"bucket_cap_mb": 2}
    ways = [{"impl": "unisono-ddp", "label": "unisono-ddp", "options": ours},
            {"impl": "unisono-ddp", "label": "unisono-ddp, step in backward", "options": {**ours, "overlap_forward": False}},
            {"impl": "unisono-ddp", "label": "unisono-ddp, overlap_forward", "options": {**ours, "overlap_forward": True}},
            {"impl": "unisono-ddp", "label": "unisono-ddp, bf16", "options": {**ours, "transform": "bf16"}},
            {"impl": "torch-ddp-gloo", "label": "torch-ddp-gloo", "options": views},
            {"impl": "torch-ddp-gloo", "label": "torch-ddp-gloo, f16 hook", "options": {**views, "torch_hook": "fp16_compress_hook"}},
            {"impl": "no-sync", "label": "no-sync", "options": ours}]
    with EmulatedHosts(2, options.rate) as hosts:
        for model in models:
            print(f"  {model} on two hosts at {options.rate} ...", file=sys.stderr, flush=True)
            samples = _times(2, model, ways, options, hosts=hosts)
            rows = [row_of(s, bench="slow-link", model=model, impl=way["impl"], ranks=2, variant=way["label"],
                           bytes=gradient_bytes(MODELS[model]), more={"rate": options.rate})
                    for way, s in zip(ways, samples, strict=True)]
            report.rows += rows
            report.table(f"Two hosts at {options.rate}, Gloo between them: {model}, buckets of 2 MB",
                         ["way", "median", "min", "steps", "exposed cost"],
                         [[row.variant, show_seconds(row.median_s), show_seconds(row.min_s), str(row.count),
                           f"{100 * (row.median_s / rows[-1].median_s - 1):+.1f}%"] for row in rows])


def _scaling(options, models: list[str], report: Report) -> None:
    lines = []
    for model in models:
        alone = None
        for ranks in (1, 2, 4):
            samples, = _times(ranks, model, [{"impl": "unisono-ddp"}], options)
            row = row_of(samples, bench="scaling", model=model, impl="unisono-ddp", ranks=ranks,
                         bytes=gradient_bytes(MODELS[model]))
            report.rows.append(row)
            alone = alone or row
            cores = len(os.sched_getaffinity(0))
            ideal = alone.median_s * max(1, ranks / cores)
            lines.append([model, str(ranks), show_seconds(row.median_s), show_seconds(row.min_s), str(row.count),
                          f"{100 * ideal / row.median_s:.1f}%"])
    report.table("Weak scaling: the same batch per rank", ["model", "ranks", "median", "min", "steps", "efficiency"], lines)
    report.say("\nEfficiency: step time of one rank against that of N; ranks beyond the cores share them, which is counted as "
               "what it must cost.")
