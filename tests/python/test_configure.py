"""CMake's configuration on machines whose MPI is broken, or was removed after an earlier one."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def configure(tmp_path):
    def call(*options):
        return subprocess.run(["cmake", "-S", REPOSITORY, "-B", tmp_path / "build", "-G", "Ninja", "-DUNISONO_TORCH=OFF", *options],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, stdin=subprocess.DEVNULL)

    return call


@pytest.fixture
def compiler(tmp_path):
    """`compiler(line)`: an mpicxx that runs this line of shell."""

    def make(line):
        path = tmp_path / "mpicxx"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return path

    return make


def test_a_broken_mpi_is_left_out_and_its_words_are_kept(configure, compiler):
    broken = compiler("echo 'mpi.h: no such file' >&2; exit 1")
    result = configure(f"-DUNISONO_MPICXX={broken}")
    assert result.returncode == 0, result.stdout
    assert "the transport mpi is left out" in result.stdout
    assert f"{broken} does not compile" in result.stdout and "mpi.h: no such file" in result.stdout


def test_who_insists_on_mpi_is_told_why_it_cannot_be(configure, compiler):
    broken = compiler("echo 'mpi.h: no such file' >&2; exit 1")
    result = configure(f"-DUNISONO_MPICXX={broken}", "-DUNISONO_MPI=ON")
    assert result.returncode != 0
    assert "UNISONO_MPI=ON" in result.stdout and "mpi.h: no such file" in result.stdout


def test_an_mpi_that_was_removed_is_forgotten(configure, compiler, tmp_path):
    gone = compiler("exit 0")
    first = configure(f"-DUNISONO_MPICXX={gone}")
    assert first.returncode == 0 and f"MPI for the transport mpi: {gone}" in first.stdout, first.stdout
    stale = tmp_path / "build" / "libunisono_mpi.so"
    stale.write_text("of the MPI that goes")
    gone.unlink()
    again = configure()
    assert again.returncode == 0, again.stdout
    assert str(gone) not in again.stdout
    if "the transport mpi is left out" in again.stdout:
        assert not stale.exists()
    off = configure("-DUNISONO_MPI=OFF")
    assert off.returncode == 0 and "UNISONO_MPI is OFF" in off.stdout and not stale.exists(), off.stdout
