"""What the Python examples share: how far a run is, its directory, and the table at its end."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import unisono


def minutes(seconds: float) -> str:
    """"1:05" for 65 seconds."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


def count(n: int, thing: str) -> str:
    return f"{n} {thing}" + ("" if n == 1 else "s")


class Progress:
    """One line overwritten on a terminal, a plain line every few seconds elsewhere. Only one rank should speak.

    `unisono run` carries its workers' output through pipes and says in UNISONO_PROGRESS which of the two to do.
    """

    def __init__(self, speaks: bool):
        how = os.environ.get("UNISONO_PROGRESS")
        self._speaks = speaks
        self._overwrite = how == "overwrite" if how else sys.stdout.isatty()
        self._shown = 0.0

    def show(self, text: str) -> None:
        now = time.monotonic()
        if not self._speaks or now - self._shown < (0.2 if self._overwrite else 10):
            return
        self._shown = now
        print(text, end="\x1b[K\r" if self._overwrite else "\n", flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._speaks:
            print(text, end="\x1b[K\n" if self._overwrite else "\n", flush=True)


class RunDirectory:
    """runs/<name>/ of one run: metrics.jsonl, written by rank 0 a whole line at a time, and trace.json, which appears
    whole or not at all. What an earlier run of the same name left is removed first. *Collective*."""

    def __init__(self, out: str, name: str, group: unisono.ProcessGroup):
        self.path = Path(out) / name
        self._group = group
        self._metrics = None
        if group.rank() == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            for old in self.path.iterdir():
                if old.name in ("metrics.jsonl", "trace.json", "loss.png") or old.name.startswith(".trace"):
                    old.unlink()
            self._metrics = (self.path / "metrics.jsonl").open("w", buffering=1)
        group.barrier().wait()

    def write(self, kind: str, **values) -> None:
        if self._metrics:
            self._metrics.write(json.dumps({"kind": kind, **values}) + "\n")

    def write_trace(self, events) -> None:
        """All ranks' events as one timeline. *Collective*."""
        parts = [self.path / f".trace.rank{rank}.json" for rank in range(self._group.size())]
        rank = self._group.rank()
        unisono.write_chrome_trace(str(parts[rank]), rank, events)
        self._group.barrier().wait()
        if rank == 0:
            merged = [event for part in parts for event in json.loads(part.read_text())["traceEvents"]]
            unfinished = self.path / ".trace.json"
            unfinished.write_text(json.dumps({"traceEvents": merged}))
            unfinished.rename(self.path / "trace.json")
            for part in parts:
                part.unlink()


def print_table(rows: list[tuple[str, str]]) -> None:
    left, right = (max(len(row[i]) for row in rows) for i in (0, 1))
    rule = f"+{'-' * (left + 2)}+{'-' * (right + 2)}+"
    print("\n".join([rule, *(f"| {what:<{left}} | {value:<{right}} |" for what, value in rows), rule]), flush=True)


def gather_digests(group: unisono.ProcessGroup, digest: str) -> list[str]:
    """Every rank's digest, on every rank. *Collective*."""
    mine = torch.tensor(list(digest.encode()), dtype=torch.uint8)
    everybody = torch.empty(group.size() * len(digest), dtype=torch.uint8)
    group.all_gather(everybody, mine).wait()
    return [bytes(part.tolist()).decode() for part in everybody.split(len(digest))]


def run_main(train) -> None:
    """Ends the process with `train`'s exit code; an exception becomes one line that names the rank."""
    try:
        code = train()
    except (unisono.Error, OSError, RuntimeError, ValueError) as error:
        print(f"rank {os.environ.get('RANK', 0)}: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)
