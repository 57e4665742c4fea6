"""Gradient transforms: how a bucket travels instead of in an all-reduce of its own bits. See docs/transforms.md.

`ddp.set_transform(unisono.transforms.bf16())` on every rank, before a step's first backward; None goes back.
"""

from unisono import _C
from unisono._C import GradientTransform

__all__ = ["GradientTransform", "bf16", "f16", "hook", "int8", "post_local_sgd", "power_sgd"]


def f16() -> GradientTransform:
    """Half of f32's bytes, range 6e-8 to 65,504; divided by the number of ranks before rounding."""
    return _C.f16_transform()


def bf16() -> GradientTransform:
    """Half of f32's bytes, range of f32, 8 bits of mantissa."""
    return _C.bf16_transform()


def int8(error_feedback: bool = True) -> GradientTransform:
    """A byte per element, gathered; what rounding lost is added in the next step."""
    return _C.int8_transform(error_feedback)


def power_sgd(rank: int = 1, start_step: int = 10, error_feedback: bool = True, warm_start: bool = True,
              min_compression: float = 2.0, seed: int = 0) -> GradientTransform:
    """Low-rank approximation (Vogels et al., arXiv 1905.13727). Its `state_dict()` belongs into each rank's checkpoint."""
    return _C.power_sgd_transform(rank, start_step, error_feedback, warm_start, min_compression, seed)


def post_local_sgd(start_step: int, local_group=None) -> GradientTransform:
    """Global means until `start_step`, then means over `local_group` alone (None: this rank alone). Average the parameters
    from time to time: `unisono.ParameterAverager`."""
    if local_group is not None:
        from unisono.group import resolve

        local_group = resolve(local_group)
    return _C.post_local_sgd_transform(start_step, local_group)


def hook(state, function, yields: str = "mean") -> GradientTransform:
    """A communication hook as torch defines them: `function(state, bucket)` returns a torch.futures.Future of the bucket's
    reduced tensor. `yields`: whether that is the mean over ranks or the sum."""
    if not callable(function):
        raise TypeError(f"the hook is a {type(function).__name__}, not callable")
    if yields not in ("mean", "sum"):
        raise ValueError(f"yields={yields!r}; a hook yields 'mean' or 'sum'")
    return _C.hook_transform(state, function, getattr(function, "__qualname__", type(function).__name__), yields == "mean")
