#!/usr/bin/env python3
"""Runs torch's tests of torch.distributed over a backend and says which passed, were skipped or failed, and why.

    python tests/torch_suite/run.py                                     # all, over unisono
    python tests/torch_suite/run.py test_all_reduce_sum test_barrier
    python tests/torch_suite/run.py --backend gloo --json gloo.json
    python tests/torch_suite/run.py --json unisono.json --against gloo.json --markdown table.md
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path

OUTCOMES = ("passed", "skipped", "failed")
RAISED = re.compile(r"^(?:RuntimeError: )?Process \d+ exited with error code \d+ and exception:$", flags=re.M)


def error_lines(text):
    """The first line of what each process raised; of anything else its last line."""
    lines = []
    for block in RAISED.split(text)[1:]:
        frames = list(re.finditer(r'^  File ".*\n(?:    .*\n)*', block, flags=re.M))
        rest = block[frames[-1].end():] if frames else block
        lines.append(rest.strip().split("\n")[0])
    return lines or [text.strip().split("\n")[-1]]


def run_one(case):
    """Runs one test: {test, outcome, reason, seconds, text}."""
    begin, result = time.monotonic(), unittest.TestResult()
    unittest.TestSuite([case]).run(result)
    broken = result.failures + result.errors
    outcome, reasons, text = "passed", [], ""
    if broken:
        outcome, text = "failed", broken[0][1]
        reasons = error_lines(text)
    elif result.skipped:
        outcome, reasons = "skipped", [result.skipped[0][1]]
    return {"test": case._current_test_name(), "outcome": outcome, "reason": reasons[0] if reasons else "",
            "all_reasons": reasons, "seconds": round(time.monotonic() - begin, 1), "text": text}


@contextlib.contextmanager
def output_to(path):
    """Sends what this process and those it starts print to a file; gives a stream to where it went before."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with open(path, "ab") as log, os.fdopen(os.dup(1), "w", buffering=1) as terminal:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        finally:
            for number, old in enumerate(saved, start=1):
                os.dup2(old, number)
                os.close(old)


def run_tests(names, log):
    from distributed_suite import TorchSuite, opened

    known = unittest.defaultTestLoader.getTestCaseNames(TorchSuite)
    if unknown := set(names) - set(known):
        sys.exit(f"torch has no test {', '.join(sorted(unknown))}")
    results = []
    with output_to(log) as terminal:
        for name in names or known:
            print(f"==== {name}", flush=True)
            result = run_one(TorchSuite(name))
            result["named_backends"] = name in opened
            results.append(result)
            print(f"{result['outcome']:8}{result['seconds']:6.1f} s  {name}  {result['reason']}", file=terminal)
    return results


def markdown(results, other):
    """A table of the tests that did not pass; `other` are the results of another backend, by test."""
    counts = Counter(r["outcome"] for r in results)
    lines = [", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES), ""]
    columns = ["test", "outcome", "reason", *(["other backend"] if other else [])]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in sorted(results, key=lambda r: (r["outcome"], r["reason"], r["test"])):
        if r["outcome"] == "passed":
            continue
        cells = [f"`{r['test']}`", r["outcome"], r["reason"].replace("|", "\\|")]
        if other:
            theirs = other.get(r["test"], {"outcome": "not run", "reason": ""})
            cells.append(f"{theirs['outcome']} {theirs['reason']}".strip().replace("|", "\\|"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="all if none are given")
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--world-size", type=int, default=3, help="torch's tests of subgroups need 3")
    parser.add_argument("--timeout", type=int, default=60, help="seconds a test may take")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help="how processes start")
    parser.add_argument("--cpu-for-gpu", action="store_true", help="see cpu_for_gpu.py")
    parser.add_argument("--profiles", action="store_true", help="look for unisono's collectives in profiles too")
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--markdown", type=Path, help="where the table goes; else it is printed")
    parser.add_argument("--against", type=Path, help="results of another backend to show next to these")
    parser.add_argument("--log", type=Path, default=os.devnull, help="where what the tests print goes")
    args = parser.parse_args()
    os.environ.update(BACKEND=args.backend, WORLD_SIZE=str(args.world_size), SUITE_START=args.start,
                      DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(args.timeout), PYTORCH_PRINT_REPRO_ON_FAILURE="0",
                      CUDA_VISIBLE_DEVICES="")
    os.environ.update({f"SUITE_{name.upper()}": "1" for name in ("cpu_for_gpu", "profiles") if getattr(args, name)})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as directory:
        tempfile.tempdir = directory  # torch's tests leave files behind
        os.environ["INIT_METHOD"] = f"file://{directory}/init"
        results = run_tests(args.tests, args.log)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    other = {r["test"]: r for r in json.loads(args.against.read_text())} if args.against else {}
    table = markdown(results, other)
    if args.markdown:
        args.markdown.write_text(table)
    else:
        print(table)
    return any(r["outcome"] == "failed" for r in results)


if __name__ == "__main__":
    sys.exit(main())
