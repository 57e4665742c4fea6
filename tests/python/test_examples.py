"""The examples as a user runs them, in C++ and in Python: their exit codes, their tables, the files they write, and that
all ranks end with the same bits whatever the number of ranks, the language or the size of the buckets.

The C++ programs are looked for in $UNISONO_EXAMPLES, else in the newest of build/*/examples.
"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "examples"
TEXT, DIGITS = REPOSITORY / "data" / "shakespeare.txt", REPOSITORY / "data" / "mnist.bin"
CATEGORIES = {"hooks", "buckets", "all-reduce"}


@pytest.fixture(scope="module", autouse=True)
def data():
    """Nothing is fetched where set-up has done it."""
    result = subprocess.run([sys.executable, REPOSITORY / "tools" / "fetch_data.py"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def program(name, language):
    if language == "py":
        return SCRIPTS / f"{name}.py"
    chosen = os.environ.get("UNISONO_EXAMPLES")
    found = [Path(chosen) / name] if chosen else list((REPOSITORY / "build").glob(f"*/examples/{name}"))
    found = [path for path in found if path.is_file()]
    assert found, f"the C++ example {name} is not built; configure with -DUNISONO_EXAMPLES=ON and build 'examples'"
    return max(found, key=lambda path: path.stat().st_mtime)


@pytest.fixture
def run(unisono_command, tmp_path):
    """Runs an example on n ranks and returns (its output, its metrics, its directory)."""

    def call(name, language, ranks, *flags):
        flags = ["--data", TEXT if name == "gpt" else DIGITS, "--out", tmp_path, "--name", "run", *flags]
        result = unisono_command("run", "-n", ranks, program(name, language), *flags)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout, read_metrics(tmp_path / "run"), tmp_path / "run"

    return call


def read_metrics(directory):
    text = (directory / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def check_run(stdout, metrics, directory, ranks):
    assert [entry["kind"] for entry in metrics][::len(metrics) - 1] == ["start", "summary"]
    steps = [entry for entry in metrics if entry["kind"] == "step"]
    assert [entry["step"] for entry in steps] == list(range(len(steps)))
    assert all(0 <= entry["exposed_ms"] <= entry["step_ms"] for entry in steps)
    summary = metrics[-1]
    assert summary["replicas_identical"] == "yes"
    assert len(summary["digests"]) == ranks and len(set(summary["digests"])) == 1
    assert re.search(rf"replicas identical +\| yes .*\n.*digest +\| {summary['digests'][0]}", stdout)

    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == set(range(ranks))
    assert {event["cat"] for event in spans} >= CATEGORIES
    assert all(event["dur"] >= 0 for event in spans)
    assert sorted(path.name for path in directory.iterdir()) == ["metrics.jsonl", "trace.json"]


def check_picture(directory):
    subprocess.run([sys.executable, REPOSITORY / "tools" / "plot_run.py", directory], check=True)
    picture = (directory / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("language", ["cc", "py"])
def test_gpt(run, language, ranks):
    stdout, metrics, directory = run("gpt", language, ranks, "--quick")
    check_run(stdout, metrics, directory, ranks)
    losses = [entry["loss"] for entry in metrics if entry["kind"] == "validation"]
    assert losses[-1] < losses[0] < 4.3  # ln 68 = 4.22 knows nothing
    assert re.search(r"weak-scaling efficiency +\| \d+\.\d%", stdout)
    assert metrics[-1]["tokens_per_s_1_rank"] > 0 and metrics[-1]["tokens_per_s_all_ranks"] > 0
    check_picture(directory)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("language", ["cc", "py"])
def test_mnist(run, language, ranks):
    stdout, metrics, directory = run("mnist", language, ranks, "--batch", 64 // ranks)
    check_run(stdout, metrics, directory, ranks)
    assert metrics[-1]["exact_coverage"] == "yes"
    assert metrics[-1]["accuracy"] > 0.95
    check_picture(directory)


def test_mnist_shares_what_does_not_divide(run):
    """3 ranks of 37: 4,000 digits make 36 whole batches and one of 4, of which a rank gets 1 or 2."""
    stdout, metrics, directory = run("mnist", "cc", 3, "--quick", "--batch", 37)
    check_run(stdout, metrics, directory, 3)
    assert metrics[-1]["exact_coverage"] == "yes"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("language", ["cc", "py"])
def test_minimal(unisono_command, language, ranks):
    result = unisono_command("run", "-n", ranks, program("minimal", language))
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^\[0\] replicas identical: yes\n\[0\] [0-9a-f]{64}$", result.stdout, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["gpt", "mnist"])
def test_twins_end_with_the_same_bits(run, name):
    ends = [run(name, language, 2, "--quick")[1][-1]["digests"] for language in ("cc", "py")]
    assert ends[0] == ends[1]


def test_same_bits_whatever_the_buckets(run):
    """K2: sums run over ranks element by element, so that how gradients are bucketed does not matter."""
    digests = {cap: run("gpt", "cc", 4, "--quick", "--bucket-cap-mb", cap)[1][-1]["digests"]
               for cap in (1 / 1024, 1, 25)}
    assert len(set(map(tuple, digests.values()))) == 1, digests


def test_same_bits_run_after_run(run):
    assert run("gpt", "cc", 2, "--quick")[1][-1]["digests"] == run("gpt", "cc", 2, "--quick")[1][-1]["digests"]


def test_another_seed_is_another_run(run):
    assert run("gpt", "cc", 2, "--quick", "--seed", 1)[1][-1]["digests"] != run(
        "gpt", "cc", 2, "--quick", "--seed", 2)[1][-1]["digests"]


def worker_of(launcher_pid, rank):
    """The process id of a worker: a child of the launcher with RANK in its environment."""
    for entry in Path("/proc").iterdir():
        try:
            if (entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == launcher_pid
                    and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0")):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"no worker of rank {rank}")


@pytest.mark.parametrize("language", ["cc", "py"])
def test_a_killed_rank_is_named_and_leaves_whole_files(tmp_path, language):
    launcher = subprocess.Popen(
        [sys.executable, "-m", "unisono", "run", "-n", "3", program("gpt", language), "--steps", "100000", "--batch", "4",
         "--data", TEXT, "--out", tmp_path, "--name", "run"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    try:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
        while not metrics.is_file() or metrics.read_text().count("\n") < 10:
            assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()
            time.sleep(0.02)  # polls another process's file
        os.kill(worker_of(launcher.pid, 1), signal.SIGKILL)
        _, stderr = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL
    for survivor in (0, 2):
        assert re.search(rf"^\[{survivor}\] rank {survivor}: .*rank 1\b", stderr, re.MULTILINE), stderr
    assert all(entry["kind"] in ("start", "step", "validation") for entry in read_metrics(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("language", ["cc", "py"])
def test_progress_is_one_line_on_a_terminal(tmp_path, language):
    terminal, end = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "unisono", "run", "-n", "2", program("mnist", language), "--quick", "--data", DIGITS,
         "--out", tmp_path], stdout=end, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    os.close(end)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # how a pseudo-terminal says that nobody writes any more
            break
    os.close(terminal)
    assert launcher.wait(timeout=30) == 0, launcher.stderr.read()
    launcher.stderr.close()
    lines = shown.replace(b"\r\n", b"\n").split(b"\n")
    progress = [line for line in lines if b"loss" in line]
    assert len(progress) == 1 and progress[0].count(b"\x1b[K\r") >= 1
    assert progress[0].split(b"\r")[-1].startswith(b"[0] epoch 1: held-out accuracy")


@pytest.mark.parametrize("language", ["cc", "py"])
@pytest.mark.parametrize("name", ["gpt", "mnist"])
def test_missing_data_is_told(tmp_path, name, language):
    command = [program(name, language), "--data", tmp_path / "none", "--out", tmp_path]
    result = subprocess.run([sys.executable, *command] if language == "py" else command, capture_output=True, text=True)
    assert result.returncode == 1
    assert re.fullmatch(r"rank 0: .*none.*fetch_data\.py\n", result.stderr)


@pytest.mark.parametrize("flags, told", [
    (["--stepz", "3"], "stepz"), (["--steps", "0"], "steps"), (["--steps", "many"], "many"), (["--steps"], "steps"),
])
def test_a_wrong_flag_is_told(tmp_path, flags, told):
    result = subprocess.run([program("gpt", "cc"), *flags, "--out", tmp_path], capture_output=True, text=True)
    assert result.returncode == 1 and told in result.stderr and result.stderr.count("\n") == 1


def test_model_averaging_shows_what_it_says(unisono_command):
    result = unisono_command("run", "-n", 2, SCRIPTS / "model_averaging.py")
    assert result.returncode == 0, result.stderr
    away = {(found[1], found[2]): float(found[3])
            for found in re.finditer(r"(SGD|momentum|Adam) +(gradients|parameters every \d+) +(\S+) +\d+ µs", result.stdout)}
    assert len(away) == 12
    linear = [away[name, way] for name in ("SGD", "momentum") for way in ("gradients", "parameters every 1")]
    assert max(linear) < 1e-5  # rounding, over 200 steps
    assert away["Adam", "gradients"] < 1e-5
    others = [value for (name, way), value in away.items() if way in ("parameters every 4", "parameters every 16")]
    assert min([*others, away["Adam", "parameters every 1"]]) > 1e-3


def test_the_program_for_gpus_runs_on_the_cpu(unisono_command):
    """What tools/try_gpus.sh starts where there are GPUs, over Gloo."""
    result = unisono_command("run", "-n", 2, REPOSITORY / "tests" / "gpu" / "wrapper_on_devices.py", "--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("replicas equal") == 2
