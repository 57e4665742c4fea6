"""Under a real Slurm: a controller and two nodes that private_slurm.py makes of this machine."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import unisono
from private_slurm import PrivateSlurm, why_not

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("UNISONO_BUILD_DIR", REPOSITORY / "build" / "release"))
EXAMPLE = BUILD / "examples" / "minimal"
LIMIT_S = 40  # of one job; nothing but trouble takes that long

TRAIN = """
import os, socket, torch, unisono
group = unisono.init(start_timeout=20)
torch.manual_seed(0)
model = unisono.DistributedDataParallel(torch.nn.Linear(300, 200))
model(torch.full((4, 300), float(group.rank() + 1))).sum().backward()
numbers = torch.arange(5.0) * (group.rank() + 1)
group.all_reduce(numbers, "sum").wait()
print(f"rank {group.rank()} on {socket.gethostname()}: {group.name} of {group.size()}, gradient "
      f"{model.module.weight.grad.unique().tolist()}, sums {numbers.tolist()}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := why_not():
        pytest.skip(f"no private Slurm: {reason}")
    with PrivateSlurm(tmp_path_factory.mktemp("slurm")) as made:
        (made.folder / "rank.py").write_text(TRAIN)
        yield made


def by_rank(text):
    return {int(rank): said for rank, said in re.findall(r"^rank (\d+) (.*)$", text, re.M)}


def expected(name, hosts):
    """What the ranks of rank.py say, in a world that is spread over `hosts` in this order."""
    size = len(hosts)
    total = size * (size + 1) / 2
    return {rank: f"on {host}: {name} of {size}, gradient [{4 * total / size}], sums {[i * total for i in range(5)]}"
            for rank, host in enumerate(hosts)}


def srun(slurm, *arguments):
    code, text = slurm.run("srun", *arguments, limit_s=LIMIT_S)
    assert code == 0, text + slurm.logs()
    return text


def test_ranks_on_one_node_share_memory(slurm):
    assert by_rank(srun(slurm, "--ntasks=2", "python", "rank.py")) == expected("shm", ["n0", "n0"])


def test_ranks_on_two_nodes(slurm):
    text = srun(slurm, "--nodes=2", "--ntasks-per-node=2", "python", "rank.py")
    assert by_rank(text) == expected("hierarchy/c10d/gloo", ["n0", "n0", "n1", "n1"]), text


def test_pmi2_tells_the_nodes_too(slurm):
    """PMI_RANK and PMI_SIZE, which it sets, do not."""
    text = srun(slurm, "--mpi=pmi2", "--nodes=2", "--ntasks=2", "python", "rank.py")
    assert by_rank(text) == expected("c10d/gloo", ["n0", "n1"]), text


def test_the_script_in_the_docs(slurm):
    text = (REPOSITORY / "docs" / "running.md").read_text()
    script = re.search(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", text, re.S)[1]
    (slurm.folder / "job.sh").write_text(script)
    (slurm.folder / "train.py").write_text(TRAIN)
    state, text = slurm.batch("--ntasks-per-node=1", "--cpus-per-task=2", "job.sh", limit_s=LIMIT_S)
    assert state == "COMPLETED" and by_rank(text) == expected("c10d/gloo", ["n0", "n1"]), f"{state}\n{text}"


def test_a_batch_script_is_no_rank(slurm):
    """Slurm has set SLURM_PROCID=0 there, and the SLURM_NTASKS of the allocation, whose tasks nobody has started."""
    program = "import unisono as u; print(u.describe_environment()); print('size', u.init(start_timeout=1).size())"
    state, text = slurm.batch("--ntasks=3", "--wrap", f'python -c "{program}"', limit_s=LIMIT_S)
    assert state == "COMPLETED" and "size 1\n" in text, f"{state}\n{text}"
    assert "a world of one: SLURM_PROCID=0 SLURM_NTASKS=3" in text


# Rank 0 of the first step waits for its rank 1, which comes when the second step has ended.
ONE_OF_TWO = """
import os, sys, time
from pathlib import Path
step, first, rank0 = sys.argv[1], sys.argv[1] == "first", os.environ["SLURM_PROCID"] == "0"
def wait_for(path):
    end = time.monotonic() + 20
    while not Path(path).exists() and time.monotonic() < end:
        time.sleep(0.01)
import torch, unisono
if first and rank0:
    Path("begun").touch()
elif first:
    wait_for("ended")
else:
    wait_for("begun")
try:
    group = unisono.init(start_timeout=20)
    numbers = torch.tensor([1.0 if first else 10.0])
    group.all_reduce(numbers, "sum").wait()
    print(f"{step} {group.rank()} of {group.size()} over {group.name}: {numbers.item()}\\n", end="", flush=True)
finally:
    if not first:
        Path("ended").touch()
"""


@pytest.mark.parametrize(("nodes", "name"), [(1, "shm"), (2, "c10d/gloo")])
def test_steps_of_one_job_at_one_time_are_apart(slurm, nodes, name):
    (slurm.folder / "step.py").write_text(ONE_OF_TWO)
    for file in ("begun", "ended"):
        (slurm.folder / file).unlink(missing_ok=True)
    step = f"srun --exact --nodes={nodes} --ntasks=2 python step.py"
    state, text = slurm.batch(f"--nodes={nodes}", f"--ntasks-per-node={4 // nodes}",
                              "--wrap", f"{step} first & {step} second & wait", limit_s=LIMIT_S)
    said = sorted(re.findall(r"^(?:first|second) \d .*$", text, re.M))
    assert said == [f"{step} {rank} of 2 over {name}: {total}"
                    for step, total in (("first", 2.0), ("second", 20.0)) for rank in range(2)], f"{state}\n{text}"


def example_on(slurm, *arguments):
    """The digest with which minimal.cc ends, under these arguments of srun."""
    if not EXAMPLE.exists():
        if os.environ.get("UNISONO_REQUIRE_CPP"):
            pytest.fail(f"{EXAMPLE} was not built")
        pytest.skip(f"{EXAMPLE} was not built")
    text = srun(slurm, *arguments, EXAMPLE)
    assert text.count("replicas identical: yes") == 1, text  # rank 0 says it, and nobody took itself for a world of one
    return re.search(r"^[0-9a-f]{64}$", text, re.M)[0]


def test_a_cpp_program(slurm):
    example_on(slurm, "--ntasks=2")


@pytest.mark.parametrize("started", ["pmix", "none"])
def test_a_cpp_program_on_two_nodes_has_the_same_bits(slurm, started):
    """Over the MPI that srun starts, and over Gloo where it starts none."""
    if reason := why_no_pmix(slurm) if started == "pmix" else why_no_gloo():
        pytest.skip(reason)
    two_nodes = example_on(slurm, f"--mpi={started}", "--nodes=2", "--ntasks=2")
    assert two_nodes == example_on(slurm, "--ntasks=2")


def why_no_gloo():
    return next(reason for name, _, reason in unisono.viable_transports(2) if name == "gloo")


def why_no_pmix(slurm):
    library = BUILD / "libunisono_mpi.so"
    if not library.exists():
        return f"{library} was not built: CMake found no MPI"
    if "libmpi.so.40" not in subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout:
        return f"{library} was not built for Open MPI, which is what takes PMIx from srun"
    plugins = slurm.run("srun", "--mpi=list", limit_s=10)[1]
    return "" if "pmix" in plugins else f"this Slurm has no PMIx: {plugins}"
