"""A part of torch's own tests of torch.distributed over the backend "unisono"; tests/torch_suite/run.py runs all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parents[1] / "torch_suite" / "run.py"

COLLECTIVES = [
    "test_all_gather_coalesced_with_empty", "test_all_gather_complex", "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_sum", "test_all_reduce_complex_unsupported_ops", "test_all_reduce_product",
    "test_all_reduce_sum_async", "test_all_to_all_complex", "test_all_to_all_single_unequal_split_full_group",
    "test_barrier", "test_batch_isend_irecv_gloo_tags", "test_broadcast", "test_gather", "test_get_future",
    "test_irecv", "test_reduce_full_group_max", "test_scatter_complex", "test_scatter_object_list",
    "test_send_recv_any_source", "test_send_recv_with_tag", "test_sparse_all_reduce_sum",
]
GROUPS = ["test_destroy_group", "test_get_backend", "test_get_rank_size_group"]
DDP = [
    "test_DistributedDataParallelCPU_grad_is_view", "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_create_graph", "test_grads_same_across_ranks_with_no_sync", "test_static_graph_api_cpu",
]
# Tests that ask for GPUs without need, run on the CPU: see tests/torch_suite/cpu_for_gpu.py.
FOR_GPUS = [
    "test_all_gather_into_cat_tensor_cuda", "test_all_to_all_single_unequal_split_cuda_complex",
    "test_batch_isend_irecv_ring_exchange_nccl", "test_coalescing_manager_async", "test_reduce_scatter_tensor_cuda",
    "test_ddp_buffer_hook_allreduce_return_future", "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_powerSGD", "test_ddp_join_model_equivalence", "test_post_localSGD_optimizer_parity",
    "test_undefined_grad_parity_unused_parameters",
]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """Results by test, of one run per list of tests: processes are forked from one that has imported torch."""
    known = {}

    def call(tests, *options):
        if options not in known:
            path = tmp_path_factory.mktemp("torch_suite") / "results.json"
            run = subprocess.run([sys.executable, RUNNER, *options, f"--json={path}", *tests], capture_output=True,
                                 text=True, stdin=subprocess.DEVNULL)  # each test has the runner's time limit
            assert path.exists(), run.stdout + run.stderr
            known[options] = {result["test"]: result for result in json.loads(path.read_text())}
        return known[options]

    return call


def check(result):
    assert result["outcome"] == "passed", result["reason"] + "\n" + result["text"]


@pytest.mark.parametrize("test", COLLECTIVES + GROUPS + DDP)
def test_passes(results_of, test):
    check(results_of(COLLECTIVES + GROUPS + DDP)[test])


@pytest.mark.parametrize("test", FOR_GPUS)
def test_for_gpus_passes_on_the_cpu(results_of, test):
    check(results_of(FOR_GPUS, "--cpu-for-gpu")[test])
