"""`unisono bench all-reduce`."""

import contextlib
import os
import tempfile

from unisono.bench.launch import BenchError, Team, unisono_run
from unisono.bench.report import Report, row_of, show_bytes, show_seconds
from unisono.bench.rivals import find_mpis

SIZES = [4 << 10, 64 << 10, 1 << 20, 25 << 20, 100_000_000]
QUICK_SIZES = [4 << 10, 1 << 20]
_BURST_S = 0.03  # so many calls are made at once as take about this long
_MOST_CALLS = 5000
_MOST_S = 25.0  # spent on one rival at one size, at most
_LOOPS = {"unisono-inplace": "C++", "limit": "C++", "openmpi": "C++", "mpich": "C++", "unisono-torch": "Python",
          "gloo": "Python"}

# What it must be at least, as times faster than Gloo: (impl, ranks, bytes) -> factor.
GOALS = {("unisono-inplace", 2, 25 << 20): 6, ("unisono-inplace", 2, 4 << 10): 50, ("unisono-inplace", 4, 25 << 20): 4,
         ("unisono-inplace", 4, 4 << 10): 10, ("unisono-torch", 2, 25 << 20): 2.5, ("unisono-torch", 2, 4 << 10): 5}
LIMIT_GOAL = (25 << 20, 2, 1.25)  # in place: at this size and ranks, within this of the limit


def run(options, report: Report) -> None:
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    rounds = options.rounds or (2 if options.quick else 15)
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        mpis, remarks = find_mpis(options.mpi, folder)
        for ranks in options.ranks:
            with contextlib.ExitStack() as stack:
                rivals, abouts = _start(ranks, max(sizes), mpis, remarks, stack)
                report.say(f"\n{ranks} ranks: {'; '.join(abouts + remarks)}\n")
                samples = {(impl, size): found for size in sizes for impl, found in _measure(rivals, size, rounds).items()}
            _report(report, ranks, samples)


def _start(ranks: int, largest: int, mpis, remarks: list[str], stack):
    """What can be told "burst": impl -> (team, words before the numbers)."""
    limit_fd = os.memfd_create("unisono-bench-limit")
    stack.callback(os.close, limit_fd)
    os.ftruncate(limit_fd, ranks * (largest + 4096))
    limit_path = f"/proc/{os.getpid()}/fd/{limit_fd}"
    team = Team("unisono and Gloo", lambda path: unisono_run(ranks, "unisono.bench.all_reduce_worker", path, limit_path),
                ranks)
    stack.callback(team.close)
    abouts = [team.about]
    rivals = {impl: (team, ["burst", impl]) for impl in ("unisono-inplace", "unisono-torch", "gloo")}
    if ranks in (2, 4):
        rivals["limit"] = (team, ["burst", "limit"])
    for mpi in mpis:
        try:
            other = Team(mpi.impl, lambda path, mpi=mpi: mpi.command(ranks, path), ranks)
        except BenchError as error:
            remarks.append(str(error))
            continue
        stack.callback(other.close)
        abouts.append(other.about)
        rivals[mpi.impl] = (other, ["burst"])
    return rivals, abouts


class _Samples:
    def __init__(self):
        self.seconds: list[float] = []  # per call, one value for each burst: that of its slowest rank
        self.calls = 1
        self.fastest = float("inf")
        self.memory = 0
        self.spent = 0.0


def _measure(rivals, size: int, rounds: int) -> dict[str, _Samples]:
    """A burst of each in turn, the order turned by one in each round. How many calls a burst has follows from the fastest
    so far; the first two rounds only find that out."""
    found = {impl: _Samples() for impl in rivals}
    order = list(rivals)
    for round_number in range(-2, rounds):
        for impl in order:
            s = found[impl]
            if s.spent > _MOST_S:
                continue
            team, words = rivals[impl]
            # a handful of calls first: fresh memory, cold caches, sleeping threads
            warm_up = 2 if s.calls < 10 else s.calls // 5
            answers = team.tell(*words, size, warm_up, s.calls)
            seconds = max(float(answer[0]) for answer in answers) / s.calls
            s.spent += seconds * (warm_up + s.calls)
            s.memory = max(s.memory, *(int(answer[1]) for answer in answers))
            s.fastest = max(min(s.fastest, seconds), 1e-7)
            s.calls = max(1, min(_MOST_CALLS, int(_BURST_S / s.fastest)))
            if round_number >= 0:
                s.seconds.append(seconds)
        order = order[1:] + order[:1]
    return found


def _report(report: Report, ranks: int, samples: dict) -> None:
    rows = {}
    for (impl, size), s in samples.items():
        if not s.seconds:
            continue
        rows[impl, size] = row_of(s.seconds, bench="all-reduce", op="all_reduce", impl=impl, ranks=ranks, bytes=size,
                                  peak_rss=s.memory, more={"calls": s.calls, "loop": _LOOPS[impl]})
    report.rows += rows.values()
    lines = []
    for (impl, size), row in rows.items():
        gloo, limit = rows.get(("gloo", size)), rows.get(("limit", size))
        lines.append([show_bytes(size), impl, show_seconds(row.median_s), show_seconds(row.min_s),
                      f"{row.count} x {row.more['calls']}", row.more["loop"],
                      f"{gloo.median_s / row.median_s:.3g}x" if gloo else "",
                      f"{row.median_s / limit.median_s:.2f}" if limit else "", _goal(impl, ranks, size)])
    report.table(f"All-reduce of f32, {ranks} ranks",
                 ["size", "impl", "median", "min", "bursts x calls", "loop in", "faster than Gloo", "times the limit", "goal"],
                 lines)


def _goal(impl: str, ranks: int, size: int) -> str:
    goal = []
    if (impl, ranks, size) in GOALS:
        goal.append(f"{GOALS[impl, ranks, size]}x Gloo")
    if impl == "unisono-inplace" and (size, ranks) == LIMIT_GOAL[:2]:
        goal.append(f"{LIMIT_GOAL[2]} limits")
    return ", ".join(goal)
