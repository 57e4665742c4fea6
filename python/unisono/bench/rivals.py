"""The MPIs of this machine: which there are, and a small program built with each."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("mpi_all_reduce.cc")
_KINDS = {"openmpi": "Open MPI", "mpich": "MPICH"}


@dataclass
class Mpi:
    impl: str  # "openmpi" or "mpich"
    launcher: str
    program: str

    def command(self, ranks: int, *args) -> list[str]:
        """One core a rank where there are enough, else any core."""
        fits = ranks <= len(os.sched_getaffinity(0))
        if self.impl == "openmpi":
            placing = ["--bind-to", "core"] if fits else ["--oversubscribe", "--bind-to", "none"]
        else:
            placing = ["-bind-to", "core"] if fits else ["-bind-to", "none"]
        return [self.launcher, *placing, "-n", str(ranks), self.program, *map(str, args)]


def find_mpis(folders: list[str], build_in: str) -> tuple[list[Mpi], list[str]]:
    """Those that were found and work, one of each kind, and a remark for each that is not among them."""
    found, remarks = {}, []
    places = [f"{folder}/bin" for folder in folders] + [str(Path(sys.executable).parent)]
    places += [str(Path(sys.executable).resolve().parent), *os.environ.get("PATH", "").split(os.pathsep)]
    for place in places:
        for launcher_name, compiler_name in (("mpirun.openmpi", "mpicxx.openmpi"), ("mpirun.mpich", "mpicxx.mpich"),
                                             ("mpiexec", "mpicxx")):
            launcher = shutil.which(launcher_name, path=place)
            compiler = shutil.which(compiler_name, path=place)
            impl = _kind(launcher) if launcher and compiler else None
            if impl is None or impl in found:
                continue
            program = f"{build_in}/{impl}"
            built = subprocess.run([compiler, "-O3", "-std=c++17", str(SOURCE), "-o", program], capture_output=True,
                                   text=True)
            if built.returncode == 0:
                found[impl] = Mpi(impl, launcher, program)
            else:
                last = (built.stderr.strip().splitlines() or ["no message"])[-1]
                remarks.append(f"{_KINDS[impl]}: {compiler_name} could not build the program: {last}")
    remarks += [f"{name}: not installed" for impl, name in _KINDS.items()
                if impl not in found and not any(remark.startswith(name) for remark in remarks)]
    return list(found.values()), remarks


def _kind(launcher: str) -> str | None:
    done = subprocess.run([launcher, "--version"], capture_output=True, text=True)
    text = done.stdout + done.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        return "openmpi"
    return "mpich" if "HYDRA" in text or "MPICH" in text else None
