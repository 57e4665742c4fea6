"""`unisono run` as a user meets it: its output, its exit codes, and that nothing outlives it."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

LIMIT_S = 60


def script(tmp_path, text):
    path = tmp_path / "worker.py"
    path.write_text(text)
    return path


def start(*args):
    return subprocess.Popen([sys.executable, "-m", "unisono", "run", *map(str, args)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if alive(pid)]


def read_pids(launcher, count):
    return [int(launcher.stdout.readline().split()[-1]) for _ in range(count)]


PRINT_PID_AND_STAY = "import os, time\nprint('pid', os.getpid())\ntime.sleep(600)\n"


def test_environment_of_workers(unisono_command, tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE",
             "GLOO_SOCKET_IFNAME"]
    worker = script(tmp_path, f"import os\nprint(*(os.environ[n] for n in {names}), 'port', os.environ['MASTER_PORT'])")
    result = unisono_command("run", "-n", 2, worker)
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert [re.sub(r"port \d+$", "port", line) for line in lines] == [
        f"[{r}] {r} {r} 2 2 127.0.0.1 True lo port" for r in range(2)]
    assert result.stderr == ""


def test_cores_are_shared_out(unisono_command, tmp_path):
    worker = script(tmp_path, "import os\nprint(os.environ['OMP_NUM_THREADS'], *sorted(os.sched_getaffinity(0)))")
    result = unisono_command("run", "-n", 2, worker, env={"OMP_NUM_THREADS": ""})
    cores = sorted(os.sched_getaffinity(0))
    assert result.returncode == 0, result.stderr
    assert all(line.split()[1] .isdigit() for line in result.stdout.splitlines())
    shares = [list(map(int, line.split()[2:])) for line in sorted(result.stdout.splitlines())]
    if len(cores) >= 2 and not os.path.exists("/sys/fs/cgroup/cpu.max"):
        assert shares[0] + shares[1] == cores
    kept = unisono_command("run", "-n", 2, "--no-bind", worker, env={"OMP_NUM_THREADS": "3"})
    assert sorted(kept.stdout.splitlines()) == [f"[{r}] 3 " + " ".join(map(str, cores)) for r in range(2)]


def test_many_lines_arrive_whole_and_in_order(unisono_command):
    result = unisono_command("run", "-n", 3, "seq", "1", "20000")
    assert result.returncode == 0, result.stderr
    by_rank = {f"[{r}]": [] for r in range(3)}
    for line in result.stdout.splitlines():
        prefix, number = line.split(" ")
        by_rank[prefix].append(int(number))
    assert all(numbers == list(range(1, 20001)) for numbers in by_rank.values())


def test_output_before_a_crash_is_not_lost(unisono_command, tmp_path):
    source = tmp_path / "crash.cc"
    source.write_text('#include <cstdio>\n#include <csignal>\nint main() { std::printf("last words\\nno newline"); '
                      "std::fflush(nullptr); std::printf(\"buffered line\\ncut\"); std::fflush(nullptr); std::raise(SIGSEGV); }\n")
    program = tmp_path / "crash"
    subprocess.run(["c++", "-o", program, source], check=True, timeout=LIMIT_S)
    result = unisono_command("run", "-n", 1, program)
    assert result.returncode == 139
    assert result.stdout == "[0] last words\n[0] no newlinebuffered line\n[0] cut\n"


def test_first_failure_gives_the_exit_code(unisono_command, tmp_path):
    worker = script(tmp_path, f"""
import os, sys, time
rank, pid_file = os.environ["RANK"], {str(tmp_path / "pid")!r}
if rank == "1":
    with open(pid_file + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(pid_file + ".part", pid_file)
    sys.exit("disk on fire")
while rank == "2" and not (os.path.exists(pid_file) and not os.path.exists("/proc/" + open(pid_file).read())):
    time.sleep(0.01)  # until the launcher has seen rank 1 end
if rank == "2":
    sys.exit(3)
time.sleep(600)
""")
    result = unisono_command("run", "-n", 3, worker)
    assert result.returncode == 1
    assert "[1] disk on fire" in result.stderr
    assert "rank 1 of 3 failed first: exit code 1" in result.stderr
    assert "its last line was: disk on fire" in result.stderr
    assert "rank 2 failed after it: exit code 3" in result.stderr
    assert "ended the others: 0" in result.stderr


@pytest.mark.parametrize("action, code, words", [
    ("sys.exit(7)", 7, "exit code 7"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV (exit code 139)"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (exit code 137)"),
])
def test_exit_codes(unisono_command, tmp_path, action, code, words):
    """H12."""
    worker = script(tmp_path, f"import os, signal, sys\nif os.environ['RANK'] == '1':\n    {action}\n")
    result = unisono_command("run", "-n", 2, worker)
    assert result.returncode == code
    assert f"rank 1 of 2 failed first: {words}" in result.stderr


@pytest.mark.parametrize("args, code, words", [
    (["-n", "2", "no-such-program"], 127, "there is no program no-such-program on PATH"),
    (["-n", "2", "./no/such/program"], 127, "there is no program ./no/such/program"),
    (["-n", "2", "no_such_script.py"], 127, "there is no script no_such_script.py"),
    (["-n", "2", "/etc/passwd"], 126, "/etc/passwd is not executable"),
    (["-n", "2", "/etc"], 126, "/etc is a directory"),
    (["-n", "0", "true"], 2, "-n 0: at least one rank is needed"),
    (["-n", "-3", "true"], 2, "at least one rank"),
    (["-n", "100000", "true"], 2, "-n 100000: too many ranks"),
    (["-n", "two", "true"], 2, "invalid int value: 'two'"),
    (["-n", "2", "--timeout", "0", "true"], 2, "must be above 0 seconds"),
    (["-n", "2"], 2, "PROGRAM"),
    (["true"], 2, "-n"),
])
def test_bad_command_lines(unisono_command, args, code, words):
    result = unisono_command("run", *args)
    assert result.returncode == code
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_is_no_program(unisono_command, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"\x00\x01\x02")
    path.chmod(0o755)
    result = unisono_command("run", "-n", 1, path)
    assert result.returncode == 126
    assert "Exec format error" in result.stderr


def test_time_limit(unisono_command):
    result = unisono_command("run", "-n", 2, "--timeout", "0.5", "sleep", "600")
    assert result.returncode == 124
    assert "time limit of 0.5 s: ended ranks 0, 1" in result.stderr


def test_no_public_port(tmp_path):
    """Everything the launcher listens on is loopback."""
    launcher = start("-n", 2, script(tmp_path, PRINT_PID_AND_STAY))
    try:
        read_pids(launcher, 2)
        sockets = {link.removeprefix("socket:[").rstrip("]") for fd in os.listdir(f"/proc/{launcher.pid}/fd")
                   if (link := os.readlink(f"/proc/{launcher.pid}/fd/{fd}")).startswith("socket:")}
        listening = []
        for table in ("tcp", "tcp6"):
            with open(f"/proc/net/{table}") as lines:
                for fields in map(str.split, list(lines)[1:]):
                    if fields[3] == "0A" and fields[9] in sockets:
                        listening.append(fields[1].split(":")[0])
        assert listening == ["0100007F"]
    finally:
        launcher.terminate()
        launcher.communicate(timeout=LIMIT_S)


def test_workers_die_with_a_killed_launcher(tmp_path):
    """H2."""
    launcher = start("-n", 2, script(tmp_path, PRINT_PID_AND_STAY))
    pids = read_pids(launcher, 2)
    assert all(map(alive, pids))
    launcher.kill()
    launcher.wait(LIMIT_S)
    assert wait_until_gone(pids, 2) == []


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_workers(tmp_path, sent, code):
    launcher = start("-n", 2, script(tmp_path, "import signal, sys\n"
                                     "signal.signal(signal.SIGTERM, lambda *_: sys.exit('cleaned up'))\n"
                                     + PRINT_PID_AND_STAY))
    pids = read_pids(launcher, 2)
    launcher.send_signal(sent)
    _, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == code
    assert err.count("cleaned up") == 2
    assert f"stopped by {sent.name}: ended ranks 0, 1" in err
    assert wait_until_gone(pids, 0) == []


def test_a_worker_that_ignores_being_asked_is_killed(tmp_path):
    launcher = start("-n", 1, script(tmp_path, "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                                     + PRINT_PID_AND_STAY))
    pids = read_pids(launcher, 1)
    launcher.terminate()
    launcher.communicate(timeout=LIMIT_S)
    assert wait_until_gone(pids, 0) == []


def test_a_closed_reader_ends_the_run():
    launcher = start("-n", 1, "yes")
    assert launcher.stdout.readline() == "[0] y\n"
    launcher.stdout.close()
    assert launcher.wait(LIMIT_S) == 141
    launcher.stderr.close()


def test_trace_merge(unisono_command, tmp_path):
    import json

    (tmp_path / "a.json").write_text('{"traceEvents": [{"pid": 0}]}')
    (tmp_path / "b.json").write_text('[{"pid": 1}]')
    out = tmp_path / "all.json"
    result = unisono_command("trace", "merge", out, tmp_path / "a.json", tmp_path / "b.json")
    assert result.returncode == 0, result.stderr
    plain = tmp_path / "plain"
    plain.touch()
    assert out.stat().st_mode == plain.stat().st_mode
    plain.unlink()
    assert json.loads(out.read_text()) == {"traceEvents": [{"pid": 0}, {"pid": 1}]}
    (tmp_path / "b.json").write_text("{")
    result = unisono_command("trace", "merge", out, tmp_path / "a.json", tmp_path / "b.json")
    assert result.returncode == 1
    assert "b.json is not a Chrome trace" in result.stderr
    assert len(list(tmp_path.iterdir())) == 3


def test_what_follows_the_program_is_the_programs(unisono_command):
    for args in (["echo", "--", "-x"], ["--", "echo", "--", "-x"]):
        result = unisono_command("run", "-n", 1, *args)
        assert (result.returncode, result.stdout) == (0, "[0] -- -x\n")
    result = unisono_command("run", "-n", 1)
    assert result.returncode == 2 and "PROGRAM is missing" in result.stderr


def test_a_time_limit_beyond_what_the_system_waits_at_once(unisono_command):
    assert unisono_command("run", "-n", 1, "--timeout", 3e6, "true").returncode == 0


def test_the_time_limit_holds_when_nobody_reads_the_output(tmp_path):
    reader, writer = os.pipe()
    launcher = subprocess.Popen([sys.executable, "-m", "unisono", "run", "-n", "1", "--timeout", "2", "yes"], stdout=writer,
                                stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    os.close(writer)
    try:
        _, errors = launcher.communicate(timeout=LIMIT_S)
        assert launcher.returncode == 124
        assert "time limit of 2 s" in errors
    finally:
        launcher.kill()
        os.close(reader)


def test_a_closed_output_goes_nowhere(tmp_path):
    command = f"{sys.executable} -m unisono run -n 1 {script(tmp_path, 'print(1)')} >&-"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failed_worker_leaves_no_children(unisono_command):
    result = unisono_command("run", "-n", 1, "bash", "-c", "sleep 600 >/dev/null 2>&1 & echo pid $!; exit 3")
    assert result.returncode == 3
    assert wait_until_gone([int(result.stdout.split()[-1])], 10) == []
