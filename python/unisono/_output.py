"""Carries the workers' output to the launcher's own, whole lines only, each prefixed by its rank."""

import os
import pty
import re
import selectors
import threading
import time
import tty

_LINE_LIMIT = 1 << 20  # a longer line is cut here rather than held in memory
_CHUNK = 1 << 16
_DRAIN_S = 1.0  # for what is left in the pipes once the workers are gone


class _Stream:
    """One worker's stdout or stderr: what was read, the part of a line still waiting for its end, the last line."""

    def __init__(self, rank: int, target: int, as_terminal: bool):
        if as_terminal:  # a C program then ends its buffers at every line, so a crash loses nothing
            self.read_fd, self.write_fd = pty.openpty()
            tty.setraw(self.write_fd)
        else:
            self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.prefix = b"[%d] " % rank
        self.target = target
        # On a terminal a line that ends with a carriage return alone (a progress line) is overwritten by the next.
        self._ends = ({b"\n": b"\x1b[K\n", b"\r": b"\x1b[K\r"} if os.isatty(target) else {b"\n": b"\n", b"\r": b"\n"})
        self.partial = b""
        self.last_line = ""

    def read(self) -> bytes | None:
        """Bytes, or None when there are none now."""
        try:
            return os.read(self.read_fd, _CHUNK)
        except (BlockingIOError, OSError):
            return None

    def take_lines(self, data: bytes, final: bool = False) -> bytes:
        """The complete lines, prefixed. A carriage return alone ends a line too."""
        *pieces, self.partial = re.split(rb"(?<=[\r\n])", (self.partial + data).replace(b"\r\n", b"\n"))
        if self.partial and (final or len(self.partial) > _LINE_LIMIT):
            pieces.append(self.partial + b"\n")
            self.partial = b""
        out = []
        for piece in pieces:
            line, end = piece[:-1], piece[-1:]
            if line.strip():
                self.last_line = line.decode(errors="replace").strip()
            out.append(self.prefix + line + self._ends[end])
        return b"".join(out)


class OutputPump:
    """Owns one thread, "unisono-output", that reads all streams and writes them out.

    `broken_fd` becomes readable when the launcher's own output is closed and nothing more can be written.
    """

    def __init__(self, ranks: int, stdout_as_terminal: bool, stdout: int = 1, stderr: int = 2):
        self._streams = {(rank, target): _Stream(rank, target, stdout_as_terminal and target == stdout)
                         for rank in range(ranks) for target in (stdout, stderr)}
        self._stdout, self._stderr = stdout, stderr
        self._stop_fd = os.eventfd(0)
        self.broken_fd = os.eventfd(0)
        self.broken = False
        self._thread = threading.Thread(target=self._run, name="unisono-output", daemon=True)
        self._thread.start()

    def write_fds(self, rank: int) -> tuple[int, int]:
        return self._streams[rank, self._stdout].write_fd, self._streams[rank, self._stderr].write_fd

    def last_error_line(self, rank: int) -> str:
        """After `finish`: the last line on stderr, else on stdout."""
        return self._streams[rank, self._stderr].last_line or self._streams[rank, self._stdout].last_line

    def finish(self, seconds: float | None = None) -> None:
        """To be called when the workers are gone: carries over what they left and ends the thread. Blocks as long as somebody is slow to
        read our output, at most `seconds`; then the rest is lost."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join(seconds)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop_fd, selectors.EVENT_READ)
            for stream in self._streams.values():
                selector.register(stream.read_fd, selectors.EVENT_READ, stream)
            running = True
            while running:
                for key, _ in selector.select():
                    if key.data is None:
                        running = False
                    else:
                        self._carry(key.data)
        deadline = time.monotonic() + _DRAIN_S  # a stray grandchild may go on writing for ever
        for stream in self._streams.values():
            while self._carry(stream) and time.monotonic() < deadline:
                pass
            self._write(stream.target, stream.take_lines(b"", final=True))

    def _carry(self, stream: _Stream) -> bool:
        data = stream.read()
        if data:
            self._write(stream.target, stream.take_lines(data))
        return bool(data)

    def _write(self, target: int, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.broken:
            try:
                view = view[os.write(target, view):]
            except BlockingIOError:  # a terminal somebody made non-blocking
                _wait_writable(target)
            except OSError:
                self.broken = True
                os.eventfd_write(self.broken_fd, 1)


def _wait_writable(fd: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_WRITE)
        selector.select()
