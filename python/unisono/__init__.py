"""unisono: data-parallel training for PyTorch and libtorch. Replicas that play the same notes."""

from pathlib import Path

import torch

from unisono.version import check_torch

check_torch(torch.__version__)

from unisono import _C, errors, transforms  # noqa: E402
from unisono._C import ProcessGroup, StepStats, TraceEvent, Work, describe_environment, write_chrome_trace  # noqa: E402
from unisono.averaging import ParameterAverager  # noqa: E402
from unisono.ddp import DistributedDataParallel  # noqa: E402
from unisono.errors import (  # noqa: E402
    CorruptError,
    Error,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    TimeoutError,
)
from unisono.group import init, round_robin, set_companion, viable_transports  # noqa: E402
from unisono.hosts import hierarchical, hosts_of, ordered  # noqa: E402
from unisono.precision import MixedPrecision  # noqa: E402
from unisono.sync_batch_norm import SyncBatchNorm  # noqa: E402

__version__ = _C.__version__
__all__ = [
    "CorruptError", "DistributedDataParallel", "Error", "InternalError", "InvalidArgumentError", "MismatchError",
    "MixedPrecision", "ParameterAverager", "PeerLostError", "ProcessGroup", "StepStats", "SyncBatchNorm", "TimeoutError",
    "TraceEvent", "Work", "cmake_prefix_path", "describe_environment", "errors", "hierarchical", "hosts_of", "init",
    "ordered", "round_robin", "set_companion", "transforms", "viable_transports", "write_chrome_trace",
]


def cmake_prefix_path() -> str:
    """What to give CMake as -DCMAKE_PREFIX_PATH so that find_package(unisono) finds this installation."""
    return str(Path(__file__).absolute().parent)


def _register_with_torch() -> None:
    """Makes torch.distributed.init_process_group("unisono") run on our transports."""
    import torch.distributed as dist

    if not dist.is_available() or "unisono" in dist.Backend.backend_list:
        return
    from unisono import torch_backend

    dist.Backend.register_backend("unisono", torch_backend.create, devices=["cpu"])


_register_with_torch()
