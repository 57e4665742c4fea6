"""BatchNorm over the samples of all ranks, on the CPU, where torch has none."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from unisono import _C
from unisono.group import with_companion


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d/2d/3d` whose statistics in training mode are those of all ranks' samples together: output,
    gradients and running statistics are those of one process that has the union of the batches.

    Takes inputs (N, C) and (N, C, ...) on the CPU, and the arguments of `torch.nn.SyncBatchNorm`; `process_group` is a
    unisono group, a torch.distributed group, or None: the default one at the time of the forward. Ranks may have
    different batch sizes, some none. Evaluation mode makes no collective. Every rank must run the same forwards, and
    backward through them, or none.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True, process_group=None, device=None, dtype=None, **more):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, **more)
        self.process_group = process_group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        updates = self.training and self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if updates:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / self.num_batches_tracked.item()
        running = (self.running_mean, self.running_var) if updates or not self.training else (None, None)
        if self.training:
            group = with_companion(self.process_group)
            if group.size() > 1:
                return _C.sync_batch_norm(input, self.weight, self.bias, *running, group, momentum, self.eps)
        self._check_input_dim(input)
        return functional.batch_norm(input, *running, self.weight, self.bias, self.training or running[0] is None,
                                     momentum, self.eps)

    def _check_input_dim(self, input):
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: the input has {input.dim()} dimensions; it may be (N, C) or (N, C, ...)")

    def __deepcopy__(self, memo):
        memo[id(self.process_group)] = self.process_group  # a copy talks to the same ranks
        other = memo[id(self)] = self.__class__.__new__(self.__class__)
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group=None) -> torch.nn.Module:
        """`module` with every BatchNorm in it, torch's SyncBatchNorm included, replaced by this one. Parameters and
        buffers stay the same tensors; a layer that stands in several places stays one layer. A BatchNorm itself is
        returned replaced."""
        return _convert(cls, module, process_group, {})


def _convert(cls, module, process_group, done):
    if module in done:
        return done[module]
    done[module] = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        done[module] = _replacement(cls, module, process_group)
    for name, child in list(module._modules.items()):
        if child is not None:
            done[module].add_module(name, _convert(cls, child, process_group, done))
    return done[module]


def _replacement(cls, layer, process_group):
    if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        raise ValueError(f"convert_sync_batchnorm: {layer} has no parameters yet; run a forward through it first")
    new = cls(layer.num_features, layer.eps, layer.momentum, affine=False, track_running_stats=False,
              process_group=process_group)
    new.affine, new.track_running_stats = layer.affine, layer.track_running_stats
    for name in ("weight", "bias"):
        new.register_parameter(name, getattr(layer, name))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new.register_buffer(name, getattr(layer, name))
    new.training = layer.training
    return new
