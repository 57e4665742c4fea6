"""How ranks find each other: every launcher's environment, what was left behind, who is missing, who is there twice."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta

import pytest
import torch.distributed as dist
import unisono

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "UNISONO_STORE", "OMPI_COMM_WORLD_RANK",
                      "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
HARD_LIMIT_S = 100
LIMIT = timedelta(seconds=HARD_LIMIT_S)

SUM = r"""
import sys, torch, unisono
group = unisono.init(timeout=60, start_timeout=float(sys.argv[1]))
t = torch.ones(3) * (group.rank() + 1)
group.all_reduce(t).wait()
sys.stdout.write(f"sum {group.rank()} {t[0].item()}\n")  # one piece: torchrun and mpirun mix their children's output
sys.stdout.flush()
if "stay" in sys.argv:
    sys.stdin.read()
group.barrier().wait()
"""


def clean_environment(**variables):
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    return {**env, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in variables.items()}}


class Rank:
    def __init__(self, *args, start_timeout=60, **variables):
        self.process = subprocess.Popen([sys.executable, "-c", SUM, str(start_timeout), *args], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env=clean_environment(**variables))
        self.pid = self.process.pid

    def line(self):
        return self.process.stdout.readline().strip()

    def finish(self):
        out, err = self.process.communicate(timeout=HARD_LIMIT_S)
        return self.process.returncode, out, err

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start():
    ranks = []

    def call(*args, **variables):
        ranks.append(Rank(*args, **variables))
        return ranks[-1]

    yield call
    for rank in ranks:
        if rank.process.poll() is None:
            rank.kill()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def expect_sums(ranks):
    for number, rank in enumerate(ranks):
        code, out, err = rank.finish()
        assert code == 0 and f"sum {number} 3.0" in out, (out, err)


def test_variables_set_by_hand_with_a_store_file(start, tmp_path):
    expect_sums([start(RANK=r, WORLD_SIZE=2, UNISONO_STORE=f"file:{tmp_path}/store") for r in range(2)])


def listeners(pid):
    """(address in hex, port) of the listening sockets of a process."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as lines:
            for fields in map(str.split, lines.readlines()[1:]):
                if fields[3] == "0A" and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    found.append((address, int(port, 16)))
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_store_that_rank_0_hosts_listens_on_loopback_only(start, address):
    port = free_port()
    ranks = [start("stay", RANK=r, WORLD_SIZE=2, MASTER_ADDR=address, MASTER_PORT=port) for r in range(2)]
    assert [rank.line() for rank in ranks] == ["sum 0 3.0", "sum 1 3.0"]
    assert listeners(ranks[0].pid) == [("0100007F", port)]
    assert listeners(ranks[1].pid) == []
    for rank in ranks:
        rank.process.stdin.close()
    assert [rank.process.wait(HARD_LIMIT_S) for rank in ranks] == [0, 0]


def test_torchrun(tmp_path):
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script),
                           "60"], capture_output=True, text=True, timeout=HARD_LIMIT_S, env=clean_environment())
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("sum")) == ["sum 0 3.0", "sum 1 3.0"]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_mpirun_meets_in_a_private_file_and_leaves_nothing():
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # short: Open MPI puts sockets there
        done = subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-c", SUM, "60"],
                              capture_output=True, text=True, timeout=HARD_LIMIT_S, stdin=subprocess.DEVNULL,
                              env=clean_environment(TMPDIR=temporary))
        assert done.returncode == 0, done.stderr
        assert sorted(line for line in done.stdout.splitlines() if line.startswith("sum")) == ["sum 0 3.0", "sum 1 3.0"]
        directory = os.path.join(temporary, f"unisono-{os.geteuid()}")
        assert os.stat(directory).st_mode & 0o777 == 0o700
        assert os.listdir(directory) == []


def test_a_run_that_was_killed_leaves_a_store_file_that_works(start, tmp_path):  # H1
    store = {"WORLD_SIZE": 2, "UNISONO_STORE": f"file:{tmp_path}/store"}
    first = [start("stay", RANK=r, **store) for r in range(2)]
    assert [rank.line() for rank in first] == ["sum 0 3.0", "sum 1 3.0"]
    for rank in first:
        rank.kill()
    assert os.path.getsize(f"{tmp_path}/store") > 0
    zero = start(RANK=0, **store)
    with pytest.raises(subprocess.TimeoutExpired):
        zero.process.wait(3)  # H1's late rank: rank 0 must wait for it, not pair with what the file holds
    expect_sums([zero, start(RANK=1, **store)])


def test_the_late_rank_may_be_rank_0(start, tmp_path):
    store = {"WORLD_SIZE": 2, "UNISONO_STORE": f"file:{tmp_path}/store"}
    first = [start("stay", RANK=r, **store) for r in range(2)]
    assert [rank.line() for rank in first] == ["sum 0 3.0", "sum 1 3.0"]
    for rank in first:
        rank.kill()
    one = start(RANK=1, **store)
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(3)
    expect_sums([start(RANK=0, **store), one])


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ranks_meet_over_ipv6(start):
    port = free_port()
    expect_sums([start(RANK=r, WORLD_SIZE=2, MASTER_ADDR="::1", MASTER_PORT=port) for r in range(2)])


def test_ranks_with_another_secret_or_job_do_not_meet(start, tmp_path):
    where = {"WORLD_SIZE": 2, "UNISONO_STORE": f"file:{tmp_path}/store"}
    expect_sums([start(RANK=r, UNISONO_SECRET="three", **where) for r in range(2)])
    expect_sums([start(RANK=r, UNISONO_JOB="7", **where) for r in range(2)])
    strangers = [start(RANK=r, UNISONO_SECRET=f"of {r}", start_timeout=5, **where) for r in range(2)]
    for missing, rank in zip((1, 0), strangers, strict=True):
        code, _, err = rank.finish()
        assert code == 1 and f"missing rank {missing}" in err and "UNISONO_SECRET" in err, err


@pytest.mark.parametrize("present, missing", [(0, 1), (1, 0)])
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_missing_rank_is_named(start, tmp_path, store, present, missing):  # H6
    where = {"UNISONO_STORE": f"file:{tmp_path}/store"} if store == "file" else {"MASTER_ADDR": "127.0.0.1",
                                                                                 "MASTER_PORT": free_port()}
    code, _, err = start(RANK=present, WORLD_SIZE=2, start_timeout=5, **where).finish()
    assert code == 1
    assert "TimeoutError" in err and f"missing rank {missing}" in err, err


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_rank_that_was_started_twice_is_named_on_every_rank(start, tmp_path, store):  # H6
    port = free_port()
    where = {"UNISONO_STORE": f"file:{tmp_path}/store"} if store == "file" else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [start(RANK=r, WORLD_SIZE=3, **where) for r in (0, 1)]
    seen = dist.FileStore(f"{tmp_path}/store") if store == "file" else dist.TCPStore("127.0.0.1", port, timeout=LIMIT)
    seen.wait(["unisono/round/1/rank/0", "unisono/round/1/rank/1"], LIMIT)
    ranks.append(start(RANK=0, WORLD_SIZE=3, **where))
    for code, _, err in [rank.finish() for rank in ranks]:
        assert code == 1 and "rank 0 of 3 is claimed by" in err, err
        assert f"pid {ranks[0].pid} " in err and f"pid {ranks[2].pid} " in err, err


def test_a_port_in_use_by_something_else(start):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        code, _, err = start(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=s.getsockname()[1],
                             start_timeout=3).finish()
    assert code == 1 and "cannot listen" in err and "MASTER_PORT" in err, err


@pytest.mark.parametrize("variables, words", [
    ({"RANK": 1}, ["RANK=1", "WORLD_SIZE (not set)"]),
    ({"RANK": 2, "WORLD_SIZE": 2}, ["RANK=2", "WORLD_SIZE=2"]),
    ({"RANK": "x", "WORLD_SIZE": 2}, ["RANK='x'"]),
    ({"RANK": 0, "WORLD_SIZE": 2}, ["MASTER_ADDR", "UNISONO_STORE"]),
    ({"RANK": 0, "WORLD_SIZE": 2, "UNISONO_STORE": "file:/nowhere/at/all"}, ["/nowhere/at"]),
])
def test_environments_that_make_no_sense(start, variables, words):
    code, _, err = start(**variables).finish()
    assert code == 1 and "InvalidArgumentError" in err
    for word in words:
        assert word in err, err


def test_describe_environment(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert unisono.describe_environment().startswith("a world of one")
    monkeypatch.setenv("RANK", "1")
    assert "WORLD_SIZE (not set)" in unisono.describe_environment()


def init_twice():
    groups = [unisono.init(timeout=60, start_timeout=60) for _ in range(3)]
    for group in groups:
        group.barrier().wait()
    return [group.name for group in groups]


def test_init_again_in_the_same_processes(on_ranks):
    assert on_ranks(2, init_twice, group=False) == [["shm"] * 3] * 2
