"""Two hosts of two ranks each, as network namespaces with links of their own: the same bits as on one host, links that are cut, ranks that
die or are stopped. Needs root and iproute2."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from unisono.bench.hosts import EmulatedHosts
from unisono.bench.launch import BenchError

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("emulated_rank.py")
DEADLINE_S = 10  # of a call in these tests; nothing but trouble takes that long


@pytest.fixture(scope="module")
def hosts():
    made = EmulatedHosts(2, "1gbit")
    try:
        made.__enter__()
    except BenchError as error:
        pytest.skip(f"no emulated hosts: {error}")
    yield made
    made.__exit__()


class Run:
    """Ranks 0 and 1 on host 0, 2 and 3 on host 1."""

    def __init__(self, hosts, folder, *command):
        self.ranks = hosts.start([sys.executable, *map(str, command)], 2, None, folder)

    def until(self, rank, text, limit=60):
        end = time.monotonic() + limit
        while text not in self.output(rank):
            assert self.ranks[rank][1].poll() is None and time.monotonic() < end, self.output(rank)
            time.sleep(0.01)

    def output(self, rank):
        return self.ranks[rank][0].read_text()

    def ended(self, ranks=range(4), limit=90):
        end = time.monotonic() + limit
        for rank in ranks:
            self.ranks[rank][1].wait(max(0.1, end - time.monotonic()))
        return [self.ranks[rank][1].returncode for rank in ranks]

    def close(self):
        for _, process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def start(hosts, tmp_path):
    runs = []

    def call(*command):
        runs.append(Run(hosts, tmp_path, *command))
        return runs[-1]

    yield call
    for run in runs:
        run.close()


def test_the_gpt_ends_with_the_bits_of_one_host(start, unisono_command, tmp_path):
    data = REPOSITORY / "data" / "shakespeare.txt"
    assert data.is_file(), "fetch it with: python tools/fetch_data.py"
    flags = ["--quick", "--steps", 3, "--threads", 1, "--data", data]
    alone = unisono_command("run", "-n", 4, REPOSITORY / "examples" / "gpt.py", *flags, "--out", tmp_path / "one")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    run = start(REPOSITORY / "examples" / "gpt.py", *flags, "--out", tmp_path / "two")
    assert run.ended() == [0] * 4, run.output(0)
    digest = re.compile(r"digest +\| (\w+)")
    assert digest.search(run.output(0))[1] == digest.search(alone.stdout)[1]


def errors(run, ranks):
    """What these ranks said at their end; checks that it was their own."""
    for rank, code in zip(ranks, run.ended(ranks), strict=True):
        assert code == 7, (rank, code, run.output(rank))
    return [run.output(rank) for rank in ranks]


def test_a_cut_link_is_an_error_on_every_rank(start, hosts):
    run = start(SCRIPT, DEADLINE_S)
    for rank in range(4):
        run.until(rank, "step 3")
    hosts.link(1, up=False)
    begin = time.monotonic()
    try:
        for rank, said in enumerate(errors(run, range(4))):
            assert "TimeoutError" in said or "PeerLostError" in said, said
            other = ("2", "3") if rank < 2 else ("0", "1")
            assert any(re.search(rf"ranks? [^:]*\b{r}\b", said) for r in other), said
        assert time.monotonic() - begin < DEADLINE_S + 10  # and the end of four processes on two cores
    finally:
        hosts.link(1, up=True)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_killed_rank_is_an_error_on_every_other(start, rank):
    run = start(SCRIPT, DEADLINE_S)
    for r in range(4):
        run.until(r, "step 3")
    os.kill(run.ranks[rank][1].pid, signal.SIGKILL)
    for said in errors(run, [r for r in range(4) if r != rank]):
        store_is_gone = rank == 0 and "which rank 0 or the launcher hosts, has failed" in said  # nobody can be asked then
        assert "PeerLostError" in said and (store_is_gone or re.search(rf"\brank {rank} d(ied|oes not answer)", said)), said


def test_a_stopped_rank_ends_the_others_at_their_deadline(start):
    run = start(SCRIPT, DEADLINE_S)
    for r in range(4):
        run.until(r, "step 3")
    os.kill(run.ranks[2][1].pid, signal.SIGSTOP)
    said = errors(run, [0, 1, 3])
    assert all("TimeoutError" in text or "PeerLostError" in text for text in said), said
    assert any(re.search(r"\brank 2\b", text) for text in said), said


def test_a_slow_rank_is_no_error(start):
    run = start(SCRIPT, DEADLINE_S, "--steps", 8, "--slow", 2)
    assert run.ended() == [0] * 4, run.output(0)
