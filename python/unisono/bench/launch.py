"""Starts workers, and speaks with those that are told from outside what to do next.

Workers that are told sleep in a read from a socket, all of them, so that whoever is not being measured takes no core: a rank of
MPI that waits for another one would.
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


class BenchError(Exception):
    """Measuring is not possible; the text says why."""


def worker_environment() -> dict[str, str]:
    """One thread per rank, on Open MPI's behalf as root too (a container), this very package for the workers."""
    import unisono

    package_root = str(Path(unisono.__file__).parent.parent)  # where the compiled module is, too
    path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path,
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def unisono_run(ranks: int, module: str, *args) -> list[str]:
    return [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "-m", module, *map(str, args)]


class Team:
    """The ranks of one program, told over a socket each: a line of words there, a line of words back."""

    def __init__(self, name: str, command, ranks: int, start_s: float = 120):
        self.name, self.ranks = name, ranks
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-bench-")
        path = f"{self._folder.name}/socket"
        self._output = open(f"{self._folder.name}/output", "w+")  # noqa: SIM115
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(ranks)
            self._process = subprocess.Popen(command(path), stdin=subprocess.DEVNULL, stdout=self._output,
                                             stderr=subprocess.STDOUT, env=worker_environment())
            try:
                self._links, self.about = self._meet(listener, start_s)
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise

    def _meet(self, listener, start_s: float):
        links, about = {}, ""
        listener.settimeout(0.25)
        waits = int(start_s / 0.25)
        while len(links) < self.ranks:
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                waits -= 1
                if self._process.poll() is not None or waits <= 0:
                    self._fail(f"{len(links)} of {self.ranks} ranks started")
                continue
            connection.settimeout(600)
            stream = connection.makefile("rw")
            connection.close()
            rank, about = stream.readline().rstrip("\n").split(" ", 1)
            links[int(rank)] = stream
        return [links[rank] for rank in range(self.ranks)], about

    def _fail(self, what: str):
        self._output.seek(0)
        lines = self._output.read().strip().splitlines()[-15:]
        raise BenchError(f"{self.name}: {what}; its last output was\n  " + "\n  ".join(lines))

    def tell(self, *words) -> list[list[str]]:
        """The same line to all ranks; their answers in rank order."""
        line = " ".join(map(str, words)) + "\n"
        try:
            for link in self._links:
                link.write(line)
                link.flush()
            answers = [link.readline() for link in self._links]
        except OSError as error:
            self._fail(f"{words[0]}: {error}")
        if not all(answers):
            self._fail(f"a rank ended while it was told: {line.strip()}")
        return [answer.split() for answer in answers]

    def close(self) -> None:
        for link in self._links:
            link.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._folder.cleanup()


def run_to_end(ranks: int, module: str, *args) -> None:
    """A program that needs telling nothing; *Throws* BenchError with its last words when it fails."""
    done = subprocess.run(unisono_run(ranks, module, *args), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, env=worker_environment())
    if done.returncode != 0:
        raise BenchError(f"{module} on {ranks} ranks ended with {done.returncode}:\n  "
                         + "\n  ".join(done.stdout.strip().splitlines()[-15:]))
