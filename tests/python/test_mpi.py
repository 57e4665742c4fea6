"""The transport mpi, under every MPI that is found: on the path, in the folders of UNISONO_TEST_MPI (bin folders, with : between), and the
system's Open MPI and MPICH side by side. One build of the tests serves them all; what knows an MPI's ABI is compiled here for each."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("UNISONO_BUILD_DIR", REPOSITORY / "build" / "release"))
PROGRAM = BUILD / "tests" / "mpi_tests"
BUILT_IN = BUILD / "libunisono_mpi.so"
SHIM = REPOSITORY / "src" / "comm" / "mpi" / "shim" / "shim.cc"
LIMIT_S = 100
CONTRACT_LIMIT_S = 400  # 4 ranks on few cores
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Mpi:
    """One MPI: its launcher and its compiler."""

    def __init__(self, run, compiler):
        self.run, self.compiler = run, compiler
        text = subprocess.run([run, "--version"], capture_output=True, text=True, env={**os.environ, **AS_ROOT}, check=False).stdout
        self.open_mpi = "Open MPI" in text
        version = re.search(r"\d+\.\d+\.\d+", text)
        self.name = ("Open MPI " if self.open_mpi else "MPICH ") + (version[0] if version else "?")

    def launch(self, ranks, command, limit_s=LIMIT_S, env=None, options=()):
        """The ended mpirun with its text. Its whole process group is ended at the limit."""
        call = [self.run, *(["--oversubscribe"] if self.open_mpi else []), *options, "-n", str(ranks), *map(str, command)]
        inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                   stdin=subprocess.DEVNULL, env={**inherited, **AS_ROOT, **(env or {})})
        try:
            text, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            text, _ = process.communicate(timeout=20)
            pytest.fail(f"{call} did not end within {limit_s} s:\n{text[-4000:]}")
        return process.returncode, text


def find_mpis():
    pairs = [(shutil.which(f"mpirun{suffix}"), shutil.which(f"mpicxx{suffix}")) for suffix in ("", ".openmpi", ".mpich")]
    for folder in filter(None, os.environ.get("UNISONO_TEST_MPI", "").split(":")):
        pairs.append((shutil.which("mpirun", path=folder), shutil.which("mpicxx", path=folder)))
    found = {}
    for run, compiler in pairs:
        if run and compiler:
            found.setdefault(os.path.realpath(run) + os.path.realpath(compiler), (run, compiler))
    mpis = {}
    for pair in found.values():
        mpi = Mpi(*pair)
        mpis.setdefault(mpi.name, mpi)
    return list(mpis.values())


MPIS = find_mpis()


def compile_for(mpi, folder):
    library = folder / "libunisono_mpi.so"
    built = subprocess.run([mpi.compiler, "-std=c++20", "-O1", "-shared", "-fPIC", SHIM, "-o", library],
                           capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return library


@pytest.fixture(scope="module", params=MPIS or [None], ids=lambda mpi: mpi.name.replace(" ", "") if mpi else "none")
def mpi(request, tmp_path_factory):
    if request.param is None:
        pytest.skip("no mpirun with its mpicxx on the path or in UNISONO_TEST_MPI (Debian: apt-get install libopenmpi-dev)")
    if not PROGRAM.exists():
        if os.environ.get("UNISONO_REQUIRE_CPP"):
            pytest.fail(f"{PROGRAM} was not built")
        pytest.skip(f"{PROGRAM} was not built")
    mpi = request.param
    mpi.library = compile_for(mpi, tmp_path_factory.mktemp("shim"))
    return mpi


def play(mpi, ranks, scene, **more):
    """The launcher's exit code, what each rank said, everything."""
    code, text = mpi.launch(ranks, [PROGRAM, "--scene", scene], env={"UNISONO_MPI_LIBRARY": str(mpi.library)}, **more)
    return code, {int(r): said for r, said in re.findall(r"^rank (\d+): (.*)$", text, re.M)}, text


@pytest.mark.parametrize("ranks", [2, 4])
def test_contract(mpi, ranks):
    """Bit for bit what every transport of ours does. The launcher's own verdict does not count: some tests leave a collective in
    flight, as a failed program would, and then MPI is not finalized. Brief, for the launcher mixes the ranks' lines."""
    _, text = mpi.launch(ranks, [PROGRAM, "--gtest_brief=1"], CONTRACT_LIMIT_S, {"UNISONO_MPI_LIBRARY": str(mpi.library)})
    assert "FAILED" not in text and "Failure" not in text, text[-8000:]
    passed = [int(n) for n in re.findall(r"PASSED\s+\]\D*?(\d+) tests", re.sub(r"\x1b\[\S*?m", "", text))]
    assert len(passed) == ranks and min(passed) >= 50, text[-4000:]
    print(f"{mpi.name}: {passed[0]} tests on each of {ranks} ranks")


def test_nothing_but_mpirun_is_needed(mpi):
    code, said, text = play(mpi, 3, "sum")
    assert code == 0, text
    assert said == {r: "3 ranks, mean 2.000000" for r in range(3)}


def test_a_mismatch_names_both_sides_on_all_ranks(mpi):
    code, said, text = play(mpi, 3, "mismatch")
    assert code == 0, text  # everything that was begun has ended: MPI is finalized
    assert set(said) == {0, 1, 2}
    causes = {text.split(": ", 1)[1] for text in said.values()}
    assert len(causes) == 1, said
    for part in ("rank 0 calls all_reduce(sum, 5 x f32)", "rank 1 calls all_reduce(sum, 7 x f32)"):
        assert part in said[0]


def test_a_rank_that_does_not_come_is_named_and_learns_why(mpi):
    _, said, text = play(mpi, 3, "absent")
    assert set(said) == {0, 1, 2}, text
    for rank in range(3):
        assert said[rank].startswith("timeout after "), said
        assert "rank 1 has not entered this call; the last call there was barrier" in said[rank]
    assert 450 <= int(said[0].split()[2]) < 10_000


def test_a_killed_rank_ends_the_job(mpi):
    code, said, text = play(mpi, 3, "killed")
    assert code != 0, text
    assert not any("no failure" in line for line in said.values()), text


def test_where_the_launcher_lets_them_live_the_others_meet_their_deadline(mpi):
    if not mpi.name.startswith("Open MPI 4"):
        pytest.skip(f"{mpi.name}'s launcher may end the others whatever it is told (Open MPI 4 has --enable-recovery)")
    _, said, text = play(mpi, 3, "killed", options=["--enable-recovery"])
    assert said, text
    for line in said.values():
        assert line.startswith("timeout after ") and "rank 1 has not entered this call" in line, text


def test_an_error_of_mpi_is_an_error_and_no_abort(mpi):
    code, said, text = play(mpi, 2, "error")
    assert code == 0, text
    for rank in range(2):
        assert said[rank].startswith("internal after") and "MPI_Ibcast: " in said[rank] and "root" in said[rank], said


def test_too_low_a_thread_level_is_told(mpi):
    _, _, text = play(mpi, 1, "funneled")
    assert "MPI_THREAD_FUNNELED" in text and "MPI_THREAD_MULTIPLE" in text, text


def test_a_world_of_another_size_is_told(mpi):
    _, _, text = play(mpi, 2, "another_size")
    assert "rank 0 of 3, and MPI says rank 0 of 2" in text, text


def test_without_a_launcher_it_is_a_world_of_one(mpi):
    done = subprocess.run([PROGRAM, "--scene", "sum"], capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          env={**os.environ, "UNISONO_MPI_LIBRARY": str(mpi.library)})
    assert (done.returncode, done.stdout) == (0, "rank 0: 1 ranks, mean 1.000000\n"), done.stderr


def test_the_other_abi_is_refused(mpi, tmp_path):
    """As in a program that is linked with another MPI: its symbols come first."""
    other = next((other for other in MPIS if other.open_mpi != mpi.open_mpi), None)
    if other is None:
        pytest.skip(f"needs an Open MPI and an MPICH; there is only {mpi.name}")
    needed = subprocess.run(["ldd", compile_for(other, tmp_path)], capture_output=True, text=True, check=True).stdout
    preload = re.search(r"libmpi\.so\S* => (\S+)", needed)[1]
    done = subprocess.run([PROGRAM, "--scene", "sum"], capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          env={**os.environ, "UNISONO_MPI_LIBRARY": str(mpi.library), "LD_PRELOAD": preload})
    assert done.returncode == 77, done.stderr
    assert "was built for" in done.stderr and "the MPI in this process is" in done.stderr, done.stderr


def test_without_a_library_it_is_said_what_to_install(tmp_path):
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} was not built")
    done = subprocess.run([PROGRAM, "--scene", "sum"], capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          env={**os.environ, "UNISONO_MPI_LIBRARY": str(tmp_path / "none.so")})
    assert done.returncode == 77
    assert "libopenmpi-dev" in done.stderr and "UNISONO_MPI_LIBRARY" in done.stderr


# From here on in Python, with the library that CMake has built for the MPI it found, or the one compiled above.

TRAIN = """
import sys, torch, unisono
group = unisono.init(*sys.argv[1:2])
torch.manual_seed(0)
model = unisono.DistributedDataParallel(torch.nn.Linear(300, 200))
model(torch.full((4, 300), float(group.rank() + 1))).sum().backward()
gradient = model.module.weight.grad
print(f"rank {group.rank()}: {group.name} of {group.size()}, gradient {gradient.unique().tolist()}\\n", end="", flush=True)
"""


def python_on(mpi, ranks, *arguments, env=None):
    code, text = mpi.launch(ranks, [sys.executable, "-c", TRAIN, *arguments],
                            env={"UNISONO_MPI_LIBRARY": str(mpi.library), "OMP_NUM_THREADS": "1", **(env or {})})
    return code, dict(re.findall(r"^rank (\d+): (.*)$", text, re.M)), text


def test_training_over_mpi(mpi):
    code, said, text = python_on(mpi, 2, "mpi")
    assert code == 0, text
    assert said == {str(r): "mpi of 2, gradient [6.0]" for r in range(2)}, text


def test_auto_prefers_shared_memory_on_one_host(mpi):
    code, said, text = python_on(mpi, 2)
    assert code == 0, text
    assert said == {str(r): "shm of 2, gradient [6.0]" for r in range(2)}, text


def test_auto_over_several_hosts_without_an_address_is_mpi(mpi):
    several = "OMPI_COMM_WORLD_LOCAL_SIZE" if mpi.open_mpi else "MPI_LOCALNRANKS"
    program = f"import os; os.environ[{several!r}] = '1'\n" + TRAIN
    code, text = mpi.launch(2, [sys.executable, "-c", program],
                            env={"UNISONO_MPI_LIBRARY": str(mpi.library), "OMP_NUM_THREADS": "1"})
    assert code == 0, text
    assert set(re.findall(r"^rank \d+: (\S+ of \d)", text, re.M)) == {"mpi of 2"}, text


def test_several_ranks_on_several_hosts_go_in_two_levels(mpi):
    rank, several = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE") if mpi.open_mpi else ("PMI_RANK", "MPI_LOCALNRANKS")
    program = f"import os; os.environ[{several!r}] = '2'; os.environ['UNISONO_HOST_PART'] = 'ab'[int(os.environ[{rank!r}]) // 2]\n" + TRAIN
    code, text = mpi.launch(4, [sys.executable, "-c", program],
                            env={"UNISONO_MPI_LIBRARY": str(mpi.library), "OMP_NUM_THREADS": "1"})
    assert code == 0, text
    assert set(re.findall(r"^rank \d+: (.*)$", text, re.M)) == {"hierarchy/mpi of 4, gradient [10.0]"}, text


def test_auto_alone_does_not_touch_mpi():
    program = "import unisono; unisono.init(); print([m for m in open('/proc/self/maps') if 'libmpi' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_the_library_that_cmake_built_is_found():
    if not BUILT_IN.exists():
        pytest.skip(f"{BUILT_IN} was not built: CMake found no MPI")
    program = "import unisono; print([reason for name, _, reason in unisono.viable_transports(2) if name == 'mpi'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          env={k: v for k, v in os.environ.items() if k != "UNISONO_MPI_LIBRARY"})
    assert done.stdout == "['this process was not started by mpirun, mpiexec or srun']\n", done.stderr
