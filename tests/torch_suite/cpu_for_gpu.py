"""Lets torch's tests that ask for GPUs run on the CPU: what they put on a GPU stays where it is.

Most of torch's tests of DistributedDataParallel, and those of collectives that only NCCL had when they were written, use a
GPU as a place for tensors and nothing else. A test that needs a real one (streams, SyncBatchNorm, memory) fails here over
any backend, so a result counts only next to the same test's over Gloo.
"""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

# Why torch's file skips tests that it would run, if the backend were NCCL.
NAMED_NCCL = (
    "Only Nccl supports", "Only NCCL supports", "Only Gloo and N", "NCCL Batch Send Recv Only", "NCCL Send Recv Only",
    "Coalescing manager currently tests with NCCL only", "Test requires backend unisono to be one of {'nccl'}",
    "Test requires backend gloo to be one of {'nccl'}",
)


def is_gpu(device):
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or "cuda" in str(device) if isinstance(device, int | str | torch.device) else False


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: "cpu" if name == "device" and is_gpu(value) else value for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *("cpu" if is_gpu(value) else value for value in args[1:]))
        return function(*args, **kwargs)


def install():
    """Before torch's file is imported: takes the questions for GPUs out of its decorators, and devices out of DDP."""
    passes = lambda *_args, **_kwargs: lambda function: function  # noqa: E731
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend", "requires_nccl_version"):
        setattr(common_distributed, name, passes)
    common_distributed.skip_if_no_gpu = lambda function: function
    common_distributed.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(int(world_size))}
    nothing = lambda *_args, **_kwargs: None  # noqa: E731
    torch.cuda.set_device = torch.cuda.synchronize = torch.cuda.manual_seed = nothing
    torch.cuda.current_device = lambda: 0
    torch.nn.Module.cuda = lambda module, *_args: module
    move, wrap = torch.nn.Module.to, DistributedDataParallel.__init__
    torch.nn.Module.to = lambda module, *args, **kwargs: move(
        module, *("cpu" if is_gpu(value) else value for value in args),
        **{name: "cpu" if is_gpu(value) else value for name, value in kwargs.items()})
    DistributedDataParallel.__init__ = lambda ddp, module, device_ids=None, output_device=None, *args, **kwargs: wrap(
        ddp, module, None, None, *args, **kwargs)
