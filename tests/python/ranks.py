"""N worker processes that call functions together, each call with a group of its own.

They are spawned, never forked, and kept from call to call because importing torch takes longer than most tests. After a
call that failed, hung or killed a process the whole pool is ended and the next call gets a new one.
"""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from dataclasses import dataclass


@dataclass
class Raised:
    """What a rank raised, as its result."""

    type: str
    bases: list[str]
    message: str
    trace: str


class RanksFailed(AssertionError):
    """Some rank raised, died or did not return in time."""


def outcome_of(function, *args):
    """The result of a call, or a `Raised`: for tests that expect an error on every rank."""
    try:
        return function(*args)
    except Exception as error:
        return Raised(type(error).__name__, [base.__name__ for base in type(error).__mro__], str(error),
                      traceback.format_exc())


def _serve(connection, rank, size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args, store, with_group, env = connection.recv()
        except EOFError:
            return
        before = dict(os.environ)
        os.environ["UNISONO_STORE"] = f"file:{store}"
        os.environ.update(env)
        try:
            if with_group:
                import unisono

                args = (unisono.init(timeout=30, start_timeout=30), *args)
            result = "ok", function(*args)
        except BaseException as error:
            result = "raised", Raised(type(error).__name__, [], str(error), traceback.format_exc())
        # Groups go before the caller removes the directory of their store: torch's FileStore waits minutes for a file that goes while
        # it says good-bye.
        del args
        gc.collect()
        connection.send(result)
        os.environ.clear()  # what a test sets is its own
        os.environ.update(before)


class RankPool:
    def __init__(self, size):
        context = multiprocessing.get_context("spawn")
        self._connections, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.usable = True

    def run(self, function, args, timeout, group, env):
        with tempfile.TemporaryDirectory(prefix="unisono-test-") as directory:
            for connection in self._connections:
                connection.send((function, args, f"{directory}/store", group, env))
            deadline = time.monotonic() + timeout
            results = [self._receive(rank, deadline, timeout) for rank in range(len(self._processes))]
        bad = [f"rank {rank} {kind}:\n{getattr(value, 'trace', value)}"
               for rank, (kind, value) in enumerate(results) if kind != "ok"]
        if bad:
            self.close()
            raise RanksFailed("\n".join(bad))
        return [value for _, value in results]

    def _receive(self, rank, deadline, timeout):
        try:
            if self._connections[rank].poll(max(0, deadline - time.monotonic())):
                return self._connections[rank].recv()
            return "hung", f"no result within {timeout} s"
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return "died", f"exit code {self._processes[rank].exitcode}"

    def close(self):
        self.usable = False
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join(10)
