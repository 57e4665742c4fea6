#!/usr/bin/env python3
"""Draws what an example wrote: runs/<name>/metrics.jsonl becomes runs/<name>/loss.png.

    python tools/plot_run.py runs/gpt [MORE ...]

The picture appears whole or not at all. A last line that was cut off (the run was killed) is left out.
"""

import argparse
import json
import os
import sys
from pathlib import Path


def read_metrics(path: Path) -> list[dict]:
    lines = path.read_text().splitlines()
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except ValueError:
            if number != len(lines):
                raise ValueError(f"{path}:{number} is not JSON") from None
    return entries


def smoothed(values: list[float], half: int) -> list[float]:
    """Mean over `half` neighbours on each side (fewer at the ends), so that the curve does not lag behind."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    spans = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]


def count(n, thing: str) -> str:
    return f"{n} {thing}" + ("" if n == 1 else "s")


def subtitle(entries: list[dict]) -> str:
    start = next((e for e in entries if e["kind"] == "start"), {})
    end = next((e for e in entries if e["kind"] == "summary"), None)
    parts = [f"{count(start.get('ranks'), 'rank')}, {count(start.get('threads'), 'thread')} each"]
    if end is None:
        return ", ".join([*parts, "not finished"])
    if "tokens_per_s_all_ranks" in end:
        parts.append(f"{end['tokens_per_s_all_ranks']:,.0f} tokens/s")
    parts.append(f"exposed communication {end['exposed_ms']:.2f} of {end['step_ms']:.1f} ms per step")
    parts.append(f"replicas identical: {end['replicas_identical']}")
    return ", ".join(parts)


def draw(run: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = read_metrics(run / "metrics.jsonl")
    steps = [e for e in entries if e["kind"] == "step"]
    if not steps:
        raise ValueError(f"{run / 'metrics.jsonl'} holds no steps yet")
    x, loss = [e["step"] + 1 for e in steps], [e["loss"] for e in steps]
    checks = [e for e in entries if e["kind"] == "validation"]
    key = "accuracy" if checks and "accuracy" in checks[0] else "loss"

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(x, loss, color="tab:blue", alpha=0.25, linewidth=0.8, label="training loss, rank 0's batches")
    axes.plot(x, smoothed(loss, max(1, len(loss) // 60)), color="tab:blue", linewidth=1.6, label="the same, smoothed")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy (nats)")
    axes.grid(alpha=0.3)
    target = axes if key == "loss" else axes.twinx()
    if checks:
        target.plot([e["step"] + 1 for e in checks], [e[key] for e in checks], "o-", color="tab:red", markersize=4,
                    label=f"{'validation' if key == 'loss' else 'held-out'} {key}, last {checks[-1][key]:.4f}")
    if target is not axes:
        target.set_ylabel("accuracy")
    handles, labels = axes.get_legend_handles_labels()
    if target is not axes:
        more = target.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    axes.legend(handles, labels, loc="center right" if key == "accuracy" else "upper right")
    axes.set_title(f"{run.name}\n", loc="left", fontweight="bold")
    axes.text(0, 1.02, subtitle(entries), transform=axes.transAxes, fontsize=8, color="0.35")
    figure.tight_layout()
    picture, unfinished = run / "loss.png", run / ".loss.png"
    figure.savefig(unfinished, format="png")
    pyplot.close(figure)
    os.replace(unfinished, picture)
    return picture


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="directories such as runs/gpt")
    arguments = parser.parse_args()
    try:
        for run in arguments.runs:
            print(draw(run))
    except ImportError as error:
        print(f"plot_run: {error}; install it with: pip install matplotlib", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
