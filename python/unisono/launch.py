"""`unisono run`: N workers of one program on this machine, on top of torchrun's process library.

torch gives the processes and the rendezvous store. What is added: cores shared out, output prefixed by rank, the
first failure named and its exit code passed on, nothing listening beyond loopback, no worker outliving the launcher.
"""

import contextlib
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

_GRACE_S = 2.0  # for the other ranks to notice a failure and say what they saw, before they are ended
_END_S = 10  # between SIGTERM and SIGKILL
_LONGEST_WAIT_S = 86_400.0  # at once: the system takes no arbitrary number
_ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


class LaunchError(Exception):
    """A command line that cannot be run; `exit_code` follows the shell's habit."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class LaunchOptions:
    ranks: int
    command: list[str]
    module: bool = False  # command[0] is a Python module, as in `python -m`
    timeout_s: float | None = None  # of the whole run
    bind: bool = True


def available_cores() -> tuple[list[int], bool]:
    """The cores of this process, and whether they are its own: a container's quota may grant fewer than it shows."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        granted = max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return cores, True
    return (cores, True) if granted >= len(cores) else (cores[:granted], False)


def share_cores(cores: list[int], ranks: int) -> list[list[int]]:
    """Neighbouring cores for each rank, as even as possible; none when there are more ranks than cores."""
    if ranks > len(cores):
        return [[] for _ in range(ranks)]
    return [cores[r * len(cores) // ranks:(r + 1) * len(cores) // ranks] for r in range(ranks)]


def resolve_command(command: list[str], module: bool = False) -> tuple[list[str], bool]:
    """What to execute, and whether it is Python. *Throws* LaunchError naming what is wrong with it."""
    program, *args = command
    if module:
        return [sys.executable, "-m", program, *args], True
    if program.endswith(".py"):
        if not os.path.isfile(program):
            raise LaunchError(f"there is no script {program}", 127)
        return [sys.executable, program, *args], True
    if os.path.isdir(program):
        raise LaunchError(f"{program} is a directory, not a program", 126)
    found = shutil.which(program)
    if found is None and os.path.isfile(program):
        if os.access(program, os.X_OK):
            raise LaunchError(f"{program} is not on PATH; to run the one here, say ./{program}", 127)
        raise LaunchError(f"{program} is not executable; chmod +x {program} would make it so", 126)
    if found is None:
        raise LaunchError(f"there is no program {program}" + ("" if "/" in program else " on PATH"), 127)
    return [found, *args], False


def check_ranks(ranks: int, cores: int) -> None:
    most = max(64, 8 * cores)
    if ranks < 1:
        raise LaunchError(f"-n {ranks}: at least one rank is needed")
    if ranks > most:
        raise LaunchError(f"-n {ranks}: too many ranks for {cores} cores, at most {most}")


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name} (exit code {128 - code})"


def shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


@dataclass
class Outcome:
    """How the run went: exit codes in the order in which they came."""

    exits: dict[int, int] = field(default_factory=dict)
    first_failure: int | None = None
    stopped_by: str = ""  # "SIGINT", "time limit", "closed output"; empty when the workers ended by themselves
    code: int = 0
    failed_at: float = 0.0  # time.monotonic()


class _Store:
    """The rendezvous store, listening on loopback only."""

    def __init__(self):
        from torch.distributed import TCPStore

        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            self.port = listener.getsockname()[1]
            self._store = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False,
                                   master_listen_fd=listener.detach())


def worker_environment(rank: int, options: LaunchOptions, port: int, cores: int) -> dict[str, str]:
    env = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "unisono",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // options.ranks)),
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED") or "1",
    }
    env["UNISONO_PROGRESS"] = "overwrite" if os.isatty(1) else "lines"  # what a progress line may do
    if not os.isatty(1):  # a C program sees a terminal where there may be none
        env["NO_COLOR"] = os.environ.get("NO_COLOR") or "1"
    return env


def run(options: LaunchOptions) -> int:
    """Runs the workers to their end and returns the exit code: 0, or that of the first rank that failed."""
    _open_standard_files()
    cores, exclusive = available_cores()
    check_ranks(options.ranks, len(cores))
    command, is_python = resolve_command(options.command, options.module)

    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, start_processes

    from unisono._output import OutputPump

    class NoLogFiles(LogsSpecs):
        root_log_dir = ""

        def reify(self, envs):
            nothing = {rank: "" for rank in envs}
            return LogsDest(dict(nothing), dict(nothing), {}, {}, dict(nothing))

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says is said below, by rank
    os.environ.pop("UNISONO_STORE", None)
    store = _Store()
    shares = share_cores(cores, options.ranks) if options.bind and exclusive else [[]] * options.ranks
    pump = OutputPump(options.ranks, stdout_as_terminal=not is_python)
    wrapper = str(Path(__file__).with_name("_worker_exec.py"))
    args, envs = {}, {}
    for rank in range(options.ranks):
        out, err = pump.write_fds(rank)
        cpus = ",".join(map(str, shares[rank]))
        args[rank] = ("-I", "-S", wrapper, os.getpid(), out, err, cpus, *command)
        envs[rank] = worker_environment(rank, options, store.port, len(cores))
    outcome = Outcome()
    begin = time.monotonic()
    context = None
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)  # half a start is no start
        context = start_processes("unisono", sys.executable, args, envs, NoLogFiles())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)
        _watch(context, options, pump, outcome)
    except SignalException as stop:
        outcome.stopped_by, outcome.code = stop.sigval.name, 128 + stop.sigval
    finally:
        _end(context, everything=outcome.code != 0)
        pump.finish(_time_to_write(outcome, options, begin))
    _report(outcome, options, pump, outcome.failed_at - begin)
    return outcome.code


def _watch(context, options: LaunchOptions, pump, outcome: Outcome) -> None:
    """Until all workers have ended, one has failed and the others had their grace, or the time is up."""
    processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
    deadline = time.monotonic() + options.timeout_s if options.timeout_s else float("inf")
    with selectors.DefaultSelector() as selector:
        selector.register(pump.broken_fd, selectors.EVENT_READ)
        for rank, process in processes.items():
            selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
        while len(outcome.exits) < len(processes):
            left = deadline - time.monotonic()
            if left <= 0:
                if outcome.first_failure is None:
                    outcome.stopped_by, outcome.code = "time limit", 124
                return
            events = selector.select(min(left, _LONGEST_WAIT_S))
            ended = {}
            for key, _ in events:
                if key.data is None:
                    outcome.stopped_by, outcome.code = "closed output", 128 + signal.SIGPIPE
                    return
                selector.unregister(key.fd)
                os.close(key.fd)
                ended[key.data] = processes[key.data].wait()
            # Where two are seen at once, a signal is likelier the cause and an exit code the consequence.
            for rank, code in sorted(ended.items(), key=lambda item: (item[1] >= 0, item[0])):
                outcome.exits[rank] = code
                if code != 0 and outcome.first_failure is None:
                    outcome.first_failure, outcome.code = rank, shell_code(code)
                    outcome.failed_at = time.monotonic()
                    deadline = min(deadline, outcome.failed_at + _GRACE_S)


def _time_to_write(outcome: Outcome, options: LaunchOptions, begin: float) -> float | None:
    """Seconds for what reads our output to take the rest; None: as long as it likes, as in `unisono run ... | less`."""
    if outcome.stopped_by:
        return _GRACE_S
    return max(_GRACE_S, begin + options.timeout_s - time.monotonic()) if options.timeout_s else None


def _open_standard_files() -> None:
    """Where one is closed, the next file to be opened would take its number and get our output."""
    null = os.open(os.devnull, os.O_RDWR)
    while null <= 2:
        null = os.dup(null)
    os.close(null)


def _end(context, everything: bool) -> None:
    """Ends what still runs; a second signal meanwhile ends it at once. `everything`: also what workers that have ended left running."""
    if context is None:
        return
    from torch.distributed.elastic.multiprocessing import SignalException

    if everything:
        for process in (handler.proc for handler in context.subprocess_handlers.values()):  # each leads a session
            if process.poll() is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGTERM)
    for how, seconds in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        try:
            context.close(how, timeout=seconds)
            return
        except ProcessLookupError:  # it ended between being asked and being told
            continue
        except SignalException:
            continue


def _report(outcome: Outcome, options: LaunchOptions, pump, failed_after_s: float) -> None:
    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"unisono: {text}", file=sys.stderr, flush=True)

    unfinished = [rank for rank in range(options.ranks) if rank not in outcome.exits]
    names = ", ".join(map(str, unfinished))
    if outcome.first_failure is not None:
        rank = outcome.first_failure
        say(f"rank {rank} of {options.ranks} failed first: {describe_exit(outcome.exits[rank])} "
            f"after {failed_after_s:.1f} s")
        if line := pump.last_error_line(rank):
            say(f"its last line was: {line}")
        for other, code in outcome.exits.items():
            if other != rank and code != 0:
                say(f"rank {other} failed after it: {describe_exit(code)}")
        if unfinished:
            say(f"ended the others: {names}")
    elif outcome.stopped_by == "time limit":
        say(f"time limit of {options.timeout_s:g} s: ended ranks {names}")
    elif outcome.stopped_by.startswith("SIG"):
        say(f"stopped by {outcome.stopped_by}: ended ranks {names}")
