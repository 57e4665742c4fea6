"""Turns itself into one worker of `unisono run`; started as a file, imports next to nothing.

    _worker_exec.py PARENT OUT ERR CPUS PROGRAM ARGS...

The worker dies with its parent (the kernel sends SIGKILL when the launcher ends, however it ends), writes to the
launcher's descriptors OUT and ERR, and runs on CPUS ("0,1"; "" for any).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, out, err, cpus, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the launcher died before the line above took effect
        os._exit(128 + signal.SIGKILL)
    for target, fd in ((1, out), (2, err)):
        source = os.open(f"/proc/{parent}/fd/{fd}", os.O_WRONLY | os.O_NOCTTY)
        os.dup2(source, target)
        os.close(source)
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"unisono run: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(126)


main()
