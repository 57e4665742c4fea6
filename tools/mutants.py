#!/usr/bin/env python3
"""Breaks the reducer in one place at a time and asks whether the differential driver notices.

Each mutant is a textual patch of a copy of the source tree, built in one folder (library and differential_tests only)
and given CASES cases. Prints a table row per mutant; exit code 1 when one is not found, 2 when a patch no longer fits.

Usage: tools/mutants.py --prefix-path TORCH_CMAKE_PATH [--cases N] [--work FOLDER] [--only NAME ...] [--lock FILE]
  --check only looks whether every patch still fits. --in-place BUILD breaks this tree itself and uses a build folder
  that exists, which saves the first build; every file is put back.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Mutant:
    name: str
    file: str
    old: str
    new: str
    why: str


R = "src/reducer/"
MUTANTS = [
    Mutant("dropped wait", R + "launcher.cc",
           "      buckets_->all()[ended_].work.wait();\n",
           "",
           "gradients are used before they are averaged"),
    Mutant("count off by one", R + "reducer_messages.cc",
           "    bucket.pending = 0;\n",
           "    bucket.pending = 1;\n",
           "a bucket waits for one gradient too many and leaves at the end only: right, but never early"),
    Mutant("count too small", R + "reducer_messages.cc",
           "  bucket->pending -= order_.expects(index);\n",
           "  bucket->pending -= 2;\n",
           "a bucket leaves before its last gradient is there, which is late then"),
    Mutant("swapped places", R + "buckets.cc",
           "arena.used + spec.offsets[i]);",
           "arena.used + spec.offsets[spec.members.size() == 2 ? 1 - i : i]);",
           "two gradients lie over each other's end"),
    Mutant("late gradient forgotten", R + "reducer_messages.cc",
           "    if (verdict.late.any()) reduce_late(verdict);\n",
           "",
           "a gradient that came after its bucket had left is lost"),
    Mutant("late gradient not averaged", R + "reducer_messages.cc",
           "    launcher_.average(flat, static_cast<std::int32_t>(b));\n",
           "",
           "ranks keep their own late gradients"),
    Mutant("second late gradient replaces the first", R + "gradient_slot.cc",
           "    delta_ += dense;\n",
           "    delta_ = dense;\n",
           "a parameter that fires late twice"),
    Mutant("late not told", R + "reducer_hooks.cc",
           "    message_.late.set(index);\n",
           "",
           "nobody asks for the late gradient"),
    Mutant("produced not cleared", R + "reducer_messages.cc",
           "        message_.produced.clear(member);\n",
           "",
           "a gradient that was cleared after no_sync counts as one"),
    Mutant("produced not told", R + "reducer_hooks.cc",
           "  message_.produced.set(index);\n",
           "",
           "what ranks computed is put back as unused"),
    Mutant("kept not restored", R + "gradient_slot.cc",
           "      grad.copy_(kept_);\n",
           "",
           "a gradient that no rank produced is averaged with itself"),
    Mutant("silent takes part in weights", R + "gradient_slot.cc",
           "  if (weighted) {\n"
           "    aside_ = kept_;",
           "  if (false) {\n"
           "    aside_ = kept_;",
           "what a silent rank's gradient held is divided by the sum of weights"),
    Mutant("set aside is lost", R + "gradient_slot.cc",
           "    if (aside_.defined()) view_.add_(aside_);\n",
           "",
           "accumulated content vanishes in a weighted window"),
    Mutant("not set aside", R + "reducer_hooks.cc",
           "    return slot.take_setting_aside(used);\n",
           "    return slot.take(used);\n",
           "accumulated content is divided by the sum of weights"),
    Mutant("weight not divided", R + "launcher.cc",
           "    options.divide_by_sum = 0;\n",
           "",
           "sums instead of averages"),
    Mutant("weight replaces", R + "reducer_weights.cc",
           "  averaging_.weight += backward_weight_;\n",
           "  averaging_.weight = backward_weight_;\n",
           "only the last micro-batch counts in the denominator"),
    Mutant("weight 0 not void", R + "reducer_weights.cc",
           "  void_ = averaging_.weighted && backward_weight_ == 0;\n",
           "  void_ = false;\n",
           "NaN of a rank without samples reaches the others"),
    Mutant("weight of an abandoned backward stays", R + "reducer_messages.cc",
           "  averaging_.weight -= backward_weight_;\n",
           "",
           "a micro-batch that threw and is repeated counts twice"),
    Mutant("cleared window goes on", R + "reducer_weights.cc",
           "    for (GradientSlot& slot : slots_) slot.reset();\n"
           "    return close_window();\n",
           "    return;\n",
           "what was cleared still counts in the denominator"),
    Mutant("failure drops nothing", R + "reducer_messages.cc",
           "slot.drop();",
           "slot.reset();",
           "after a lost step ranks differ in which gradients are defined"),
    Mutant("window not closed", R + "reducer_messages.cc",
           "  averaging_ = {};\n",
           "",
           "weights of one step count in the next"),
    Mutant("opened not cleared", R + "reducer_messages.cc",
           "  opened_.clear();\n",
           "",
           "the second weighted window sets nothing aside"),
    Mutant("view not carried", R + "gradient_slot.cc",
           "    place.copy_(view_);\n",
           "",
           "a rebuild loses what gradients hold"),
    Mutant("silent not zeroed", R + "gradient_slot.cc",
           "  if (!grad.defined()) {\n"
           "    view_.zero_();\n"
           "    return;\n"
           "  }\n"
           "  kept_",
           "  if (!grad.defined()) {\n"
           "    return;\n"
           "  }\n"
           "  kept_",
           "a silent rank gives what the last step left in the bucket"),
    Mutant("foreign gradient not copied in", R + "gradient_slot.cc",
           "  if (!grad_is_view()) {\n"
           "    write_view(grad);\n"
           "    grad = view_;\n"
           "  }\n"
           "  return gradient;",
           "  return gradient;",
           "a gradient the user replaced, seen at the first hook"),
    Mutant("foreign gradient not copied in at launch", R + "gradient_slot.cc",
           "  if (!grad_is_view()) {\n"
           "    write_view(grad);\n"
           "    if (as_view_) grad = view_;\n"
           "  }\n"
           "}",
           "}",
           "a gradient of earlier backwards that is no view"),
    Mutant("average not copied out", R + "gradient_slot.cc",
           "      grad.detach().copy_(view_);\n",
           "",
           "without views, ranks keep their own gradients"),
    Mutant("launch out of order", R + "launcher.cc",
           "  next_ = 0;\n",
           "  next_ = buckets.all().size() > 2 ? 1 : 0;\n",
           "the first bucket never leaves"),
    Mutant("own order", R + "ready_order.cc",
           "  group.broadcast({order.data(), order.size(), Dtype::i32}, 0, options).wait();\n",
           "",
           "every rank plans by the order it saw"),
    Mutant("abandoned not told", R + "reducer_messages.cc",
           "      message_.abandoned.set(static_cast<std::size_t>(group_->rank()));\n",
           "",
           "peers of a rank that threw go on with nothing"),
    Mutant("abandoned not noticed", R + "reducer_hooks.cc",
           "    if (reached_) return;\n",
           "    return;\n",
           "a rank that threw leaves its peers waiting"),
    Mutant("step not counted after failure", R + "reducer_messages.cc",
           "  ++step_;\n  transition(Event::failure);\n",
           "  transition(Event::failure);\n",
           "errors name the wrong step"),
    Mutant("nested end is the end", R + "reducer_hooks.cc",
           "  if (depth == 0) {\n",
           "  if (depth >= 0) {\n",
           "a reentrant checkpoint ends the backward"),
    Mutant("no_sync ignored", R + "reducer.cc",
           "    phase_ = sync_ ? Phase::reducing : Phase::local;\n",
           "    phase_ = Phase::reducing;\n",
           "every backward synchronises"),
    Mutant("lazy conjugate", R + "gradient_slot.cc",
           " && !gradient.is_conj() && !gradient.is_neg()",
           "",
           "the bits of a conjugate are taken for its values"),
    Mutant("strict forgets", R + "reducer_messages.cc",
           "      if (!message_.produced.test(i)) message_.silent.set(i);\n",
           "",
           "strict mode says nothing"),
]
# Right results, only slower: nothing for a comparison of results to find.
EQUIVALENT = {"count off by one", "count too small"}


@contextlib.contextmanager
def held(lock):
    if not lock:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def misfits(mutants, root):
    for mutant in mutants:
        found = (root / mutant.file).read_text().count(mutant.old)
        if found != 1:
            yield f"{mutant.name}: its text is found {found} times in {mutant.file}, not once"


def sh(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          stdin=subprocess.DEVNULL, **options)


def copy_tree(work):
    for part in ("CMakeLists.txt", "cmake", "include", "src", "tests"):
        source, target = ROOT / part, work / "tree" / part
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target)  # with times, so that ninja sees what is new
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return work / "tree", work / "build"


def build(tree, folder, prefix_path):
    if not (folder / "build.ninja").exists():
        made = sh(["cmake", "-S", tree, "-B", folder, "-G", "Ninja", "-DUNISONO_TESTS=ON",
                   f"-DCMAKE_PREFIX_PATH={prefix_path}"])
        if made.returncode != 0:
            sys.exit(made.stdout[-4000:])
    return sh(["ninja", "-C", folder, "differential_tests"])


def try_mutant(mutant, tree, folder, arguments):
    path = tree / mutant.file
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        built = build(tree, folder, arguments.prefix_path)
        if built.returncode != 0:
            return None, "does not compile: " + built.stdout[-1500:]
        try:
            result = sh([folder / "tests" / "differential_tests", "--cases", str(arguments.cases), "--stop-after", "1",
                         "--no-shrink", "--timeout", "3"], timeout=arguments.limit_s)
        except subprocess.TimeoutExpired:
            return True, f"no end within {arguments.limit_s} s"
        found = re.search(r"DIFFERENCE in case (\d+)", result.stdout)
        if found:
            return True, f"found at case {found[1]}"
        if result.returncode != 0:
            return True, f"exit code {result.returncode}"
        return False, f"NOT FOUND in {arguments.cases} cases"
    finally:
        path.write_text(original)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefix-path", help="where CMake finds torch (torch.utils.cmake_prefix_path)")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--limit-s", type=float, default=180)
    parser.add_argument("--work", type=Path, help="keeps the tree and the build for another run")
    parser.add_argument("--in-place", type=Path, metavar="BUILD")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--lock", help="a file to hold an exclusive flock on while a mutant is built and run")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()

    wrong = list(misfits(MUTANTS, ROOT))
    if wrong:
        print("\n".join(wrong))
        return 2
    if arguments.check:
        print(f"{len(MUTANTS)} mutants fit")
        return 0
    if not arguments.prefix_path and not arguments.in_place:
        parser.error("--prefix-path is needed")
    with tempfile.TemporaryDirectory(prefix="unisono-mutants-") as temporary:
        if arguments.in_place:
            tree, folder = ROOT, arguments.in_place
        else:
            tree, folder = copy_tree(arguments.work or Path(temporary))
        survivors = run(tree, folder, arguments)
    print(f"{survivors} not found")
    return 1 if survivors else 0


def run(tree, folder, arguments):
    survivors = 0
    for mutant in sorted(MUTANTS, key=lambda m: m.file):  # a file that stays the same is compiled once
        if arguments.only and mutant.name not in arguments.only:
            continue
        with held(arguments.lock):
            found, text = try_mutant(mutant, tree, folder, arguments)
        if mutant.name in EQUIVALENT and not found:
            text += " (results are right, as they must be: only time is lost)"
        elif not found:
            survivors += 1
        print(f"| {mutant.name} | {mutant.file.removeprefix(R)} | {mutant.why} | {text} |", flush=True)
    return survivors


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())
