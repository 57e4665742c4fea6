"""A C++ program over Gloo: what unisono::init() takes for ranks on several hosts that no MPI has started."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import unisono
from unisono.bench.hosts import EmulatedHosts
from unisono.bench.launch import BenchError

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("UNISONO_BUILD_DIR", REPOSITORY / "build" / "release"))
PROGRAM = BUILD / "examples" / "minimal"
LIMIT_S = 60
WHY_NOT = next(reason for name, _, reason in unisono.viable_transports(2) if name == "gloo")


@pytest.fixture(scope="module")
def program():
    if not PROGRAM.exists():
        if os.environ.get("UNISONO_REQUIRE_CPP"):
            pytest.fail(f"{PROGRAM} was not built")
        pytest.skip(f"{PROGRAM} was not built")
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    return PROGRAM


@pytest.fixture(scope="module")
def digest_in_shared_memory(program):
    """The sum of two numbers is the same whoever adds them, so two ranks train to the same bits over any engine."""
    done = subprocess.run([sys.executable, "-m", "unisono", "run", "-n", "2", program], capture_output=True, text=True,
                          timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return digest_of(done.stdout)


def digest_of(text):
    assert "replicas identical: yes" in text, text
    return text.split()[-1]


def ended(processes):
    """(exit code, output) of each; whoever has not ended by the limit is ended."""
    end = time.monotonic() + LIMIT_S
    try:
        texts = [process.communicate(timeout=max(0.1, end - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


def start(command, **environment):
    others = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "UNISONO_STORE")
    inherited = {k: v for k, v in os.environ.items() if k not in others}
    return subprocess.Popen([*map(str, command)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True,
                            env={**inherited, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment})


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_torchrun_on_two_hosts(program, digest_in_shared_memory):
    """Two agents of one rank each: to the ranks it looks like two hosts."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nnodes=2", "--nproc-per-node=1",
             "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1", program]
    results = ended([start(agent), start(agent)])
    assert [code for code, _ in results] == [0, 0], results
    assert digest_of("".join(text for _, text in results if "replicas" in text)) == digest_in_shared_memory


def test_an_interface_that_is_not_there_is_named_on_every_rank(program):
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "no-such-one"}
    results = ended([start([program], RANK=str(rank), **environment) for rank in range(2)])
    assert [code for code, _ in results] == [1, 1], results
    assert all("GLOO_SOCKET_IFNAME=no-such-one" in text for _, text in results), results


def test_emulated_hosts(program, digest_in_shared_memory, tmp_path):
    hosts = EmulatedHosts(2, "1gbit")
    try:
        hosts.__enter__()
    except BenchError as error:
        pytest.skip(f"no emulated hosts: {error}")
    try:
        ranks = hosts.start([str(program)], 1, None, tmp_path)
        end = time.monotonic() + LIMIT_S
        codes = [process.wait(max(0.1, end - time.monotonic())) for _, process in ranks]
    finally:
        for _, process in ranks:
            process.kill()
        hosts.__exit__()
    texts = [output.read_text() for output, _ in ranks]
    assert codes == [0, 0], texts
    assert digest_of(texts[0]) == digest_in_shared_memory
