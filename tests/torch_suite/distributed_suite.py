"""torch's own tests of torch.distributed, which torch ships, as a unittest class over the backend named in $BACKEND.

torch's file reads BACKEND and WORLD_SIZE when it is imported, so set both first; `run.py` does. Its tests ask by name
which backends can do what. Here "unisono" is entered in the sets meant for that, and where a test's condition spells
out names (`BACKEND != "mpi"`) its skip is taken off for every backend alike: a backend that cannot do it fails.
"""

import contextlib
import inspect
import os

import torch
import unisono  # noqa: F401  registers the backend
from torch.testing._internal import common_distributed

BACKEND = os.environ["BACKEND"]
os.environ.setdefault("TEMP_DIR", "")  # torch's setUp sets it for each test

features = common_distributed.DistTestCases.backend_feature
for feature in ("ddp", "subgroup", "gpu", "plugin"):  # "gpu" is asked for by tests that also run on CPUs
    features[feature].add("unisono")
common_distributed.TIMEOUT_OVERRIDE.clear()  # one limit for all tests: DISTRIBUTED_TESTS_DEFAULT_TIMEOUT

CPU_FOR_GPU = "SUITE_CPU_FOR_GPU" in os.environ
if CPU_FOR_GPU:
    import cpu_for_gpu

    cpu_for_gpu.install()
    features["cuda"].add("unisono")

from torch.testing._internal.distributed import distributed_test  # noqa: E402

# Why torch's file skips tests that it would run on a CPU, if the backend had another name.
NAMED_BACKENDS = {
    "get_future is only supported on mpi, nccl and gloo",
    "GLOO Batch Send Recv CPU",
    "Only gloo backend supports timeouts",
    "Only Gloo backend supports sparse all reduce",
    "Only MPI supports all_to_all",
    "Only MPI supports CPU all_to_all_single",
    "Only Nccl & Gloo backend support DistributedDataParallel",
    f"Test requires backend {BACKEND} to be one of {{'gloo'}}",
}

# In a profile they look for a range named after the collective, for these backends only.
if "SUITE_PROFILES" in os.environ:
    distributed_test.PROFILING_SUPPORTED_BACKENDS.append("unisono")
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("unisono")

base = distributed_test.DistributedTest._DistTestBase
opened = set()
for name, function in inspect.getmembers(base, inspect.isfunction):
    reason = getattr(function, "__unittest_skip_why__", "")
    if reason in NAMED_BACKENDS or (CPU_FOR_GPU and reason.startswith(cpu_for_gpu.NAMED_NCCL)):
        function.__unittest_skip__ = False
        opened.add(name)


class TorchSuite(distributed_test.TestDistBackend, base):
    """Each test runs in WORLD_SIZE processes, forked from this one unless $SUITE_START is "spawn", as in torch."""

    def setUp(self):
        super().setUp()
        if os.environ["SUITE_START"] == "spawn":
            self._spawn_processes()
        else:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, test_name, parent_pipe):
        if test_name.startswith("test_accumulate_gradients_no_sync"):
            distributed_test.BACKEND = "gloo"  # the test's body prepares a model for the CPU only if this is the name
        with cpu_for_gpu.OnCpu() if CPU_FOR_GPU else contextlib.nullcontext():
            super().run_test(test_name, parent_pipe)

    def _check_return_codes(self, fn, elapsed_time):
        super()._check_return_codes(fn, elapsed_time)  # looks at the first process only, if none raised
        if fn not in self.skip_return_code_checks:
            self.assertEqual({process.exitcode for process in self.processes}, {self.processes[0].exitcode})

    def tearDown(self):
        processes = self.processes
        super().tearDown()
        for process in processes:
            process.kill()
            process.join()
