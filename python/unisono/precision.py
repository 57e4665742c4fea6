"""Mixed precision: in which dtypes parameters are kept, gradients are averaged, buffers are kept."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """Parameters are kept in `param`, gradients averaged in `reduce`, floating buffers kept in `buffer`; None leaves them
    as they are. `MixedPrecision(torch.bfloat16, torch.float32)`: half the memory, sums in f32.

    `DistributedDataParallel(mixed_precision=...)` converts the module at construction."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None


def convert(module: torch.nn.Module, precision: MixedPrecision) -> None:
    """Converts floating parameters and buffers where they are; parameters stay the same objects."""
    with torch.no_grad():
        for tensors, dtype in ((module.parameters(), precision.param), (module.buffers(), precision.buffer)):
            for tensor in tensors:
                if dtype is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)


class ComputeDtype:
    """torch's own meaning of mixed precision: parameters stay as they are and each forward computes with copies in another
    dtype; gradients come back in the parameters' dtype through the copies."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype, cast_inputs: bool):
        self._module, self._dtype, self._cast_inputs = module, dtype, cast_inputs

    def __call__(self, args, kwargs):
        copies = {name: p.to(self._dtype) if p.is_floating_point() else p for name, p in self._module.named_parameters()}
        if self._cast_inputs:
            args, kwargs = torch.utils._pytree.tree_map(self._cast, (args, kwargs))
        return torch.func.functional_call(self._module, copies, args, kwargs, tie_weights=True)

    def _cast(self, value):
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def of_keyword(value, module) -> tuple[MixedPrecision, ComputeDtype | None]:
    """From DistributedDataParallel's `mixed_precision`: ours, or torch's `_MixedPrecision`."""
    if value is None or isinstance(value, MixedPrecision):
        return value or MixedPrecision(), None
    if not all(hasattr(value, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")):
        raise TypeError(f"mixed_precision is a {type(value).__name__}; it may be unisono.MixedPrecision or torch's")
    compute = None
    if value.param_dtype is not None:
        compute = ComputeDtype(module, value.param_dtype, getattr(value, "cast_forward_inputs", True))
    return MixedPrecision(None, value.reduce_dtype, value.buffer_dtype), compute
