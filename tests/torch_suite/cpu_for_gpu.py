"""Lets torch's tests that ask for GPUs run on the CPU: what they put on a GPU stays where it is.

Most of torch's tests of DistributedDataParallel, and those of collectives that only NCCL had when they were written,
use a GPU as a place for tensors and nothing else. A test that needs a real one (streams, events, SyncBatchNorm) fails
here over any backend, so a result counts only next to the same test's over Gloo.
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
    if isinstance(device, str | torch.device):
        return str(device).startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(args):
    return tuple("cpu" if is_gpu(value) else value for value in args)


class OnCpu(TorchFunctionMode):
    """While it is entered, tensors are made on the CPU and stay there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *on_cpu(args[1:]))
        return function(*args, **kwargs)


def without_devices(init):
    def wrapped(ddp, module, device_ids=None, output_device=None, *args, **kwargs):
        init(ddp, module, None, None, *args, **kwargs)

    return wrapped


def without_nccl(new_group):
    def wrapped(*args, backend=None, **kwargs):
        return new_group(*args, backend=None if backend == "nccl" else backend, **kwargs)

    return wrapped


def install():
    """Before torch's file is imported: takes the questions for GPUs out of its decorators, and devices out of torch."""
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend",
                 "requires_nccl_version"):
        setattr(common_distributed, name, lambda *_args, **_kwargs: lambda function: function)
    common_distributed.skip_if_no_gpu = lambda function: function
    common_distributed.init_multigpu_helper = lambda size, _backend: {rank: [rank] for rank in range(int(size))}
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_args, **_kwargs: None)
    torch.cuda.current_device = lambda: 0
    move = torch.nn.Module.to
    torch.nn.Module.to = lambda module, *args, **kwargs: move(
        module, *on_cpu(args), **dict(zip(kwargs, on_cpu(kwargs.values()), strict=True)))
    torch.nn.Module.cuda = lambda module, *_args: module
    torch.distributed.new_group = without_nccl(torch.distributed.new_group)
    DistributedDataParallel.__init__ = without_devices(DistributedDataParallel.__init__)
