"""Rows, numbers and tables."""

import json
import os
import platform
import re
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write 4096, 4KiB, 25MiB or 100MB")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if size < 4 or size % 4:
        raise ValueError(f"{text!r}: a size is a multiple of 4 bytes, one f32 or more")
    return size


def show_bytes(size: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def show_seconds(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 * factor else f"{seconds / factor:.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def show_mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


@dataclass
class Row:
    """One line of the JSON file. `op` is set for collectives and `model` for training steps."""

    bench: str
    impl: str
    ranks: int
    bytes: int
    median_s: float
    min_s: float
    count: int
    peak_rss: int | None = None
    op: str | None = None
    model: str | None = None
    variant: str | None = None
    more: dict = field(default_factory=dict)

    def as_json(self) -> dict:
        row = {key: value for key, value in asdict(self).items() if key != "more"}
        for key in ("op", "model", "variant"):
            if row[key] is None:
                del row[key]
        return {**row, **self.more}


def row_of(samples: list[float], **values) -> Row:
    return Row(median_s=statistics.median(samples), min_s=min(samples), count=len(samples), **values)


class Report:
    """Collects rows; prints tables as they come and writes everything at the end."""

    def __init__(self, command: str):
        self.rows: list[Row] = []
        self._text: list[str] = []
        self._cores = Cores()
        self.say(f"`{command}`")
        self.say(machine())

    def say(self, text: str) -> None:
        print(text, flush=True)
        self._text.append(text)

    def table(self, title: str, head: list[str], lines: list[list[str]]) -> None:
        self.say(f"\n### {title}\n")
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        for line in [head, ["-" * w for w in widths], *lines]:
            # numbers to the right, names to the left
            cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
            self.say("| " + " | ".join(cells) + " |")

    def finish(self, json_path: str | None, markdown_path: str | None) -> None:
        self.say(f"\n{self._cores.disturbance()}")
        if json_path:
            write_whole(json_path, json.dumps({"rows": [row.as_json() for row in self.rows]}, indent=1) + "\n")
        if markdown_path:
            write_whole(markdown_path, "\n".join(self._text) + "\n")


def write_whole(path: str, text: str) -> None:
    """The file appears complete or not at all."""
    draft = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


class Cores:
    """Who used the cores since this was made."""

    def __init__(self):
        self._begin = self._now()

    def _now(self) -> dict[str, float]:
        """Seconds of all cores: used by us and our ended children, busy, taken by the hypervisor, passed."""
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, idle, iowait, irq, soft, steal, *_ = (
            int(word) / tick for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
        busy = user + nice + system + irq + soft
        return {"own": sum(os.times()[:4]), "busy": busy, "stolen": steal, "all": busy + idle + iowait + steal}

    def disturbance(self) -> str:
        """What this machine did beside measuring, for the reader of a table to judge it by."""
        now = self._now()
        own, busy, stolen, passed = (now[name] - self._begin[name] for name in ("own", "busy", "stolen", "all"))
        others = max(0.0, busy - own) / max(passed, 1e-9)
        return (f"Meanwhile other processes took {100 * others:.0f}% of the cores' time and the hypervisor "
                f"{100 * stolen / max(passed, 1e-9):.0f}%.")


def machine() -> str:
    import torch

    from unisono import __version__

    cpu = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (f"\n{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB; Linux {platform.release()}; "
            f"Python {platform.python_version()}; torch {torch.__version__}; unisono {__version__}; "
            f"load before the run {os.getloadavg()[0]:.2f}")
