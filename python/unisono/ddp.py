"""The module wrapper: torch's keyword arguments, unisono's reducer."""

from __future__ import annotations

import contextlib
from collections import OrderedDict

import torch

from unisono import _C
from unisono.group import resolve
from unisono.guard import guard_steps
from unisono.outputs import tensors_in

_NOT_YET = {  # torch's keywords that change nothing at these values and cannot have others yet
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": False,
    "bucket_cap_mb_list": None,
    "batched_grad_copy": False,
}


class DistributedDataParallel(torch.nn.Module):
    """Keeps the replicas of `module` on all ranks in step: after every backward, the gradient of every parameter is
    the mean over ranks, bit for bit the same on all of them.

    Takes the keyword arguments of `torch.nn.parallel.DistributedDataParallel` and, beyond them, `strict` (raise at
    the end of a backward in which a parameter received no gradient), `parameters_and_buffers_to_ignore`,
    `step_guard` (an optimizer that steps on gradients which no synchronisation has averaged raises), and for measuring
    `overlap` and `naive`. `process_group` is a unisono group, a torch.distributed group, or None.
    """

    def __init__(self, module: torch.nn.Module, device_ids=None, output_device=None, dim: int = 0,
                 broadcast_buffers: bool | None = None, init_sync: bool = True, process_group=None,
                 bucket_cap_mb: float | None = None, find_unused_parameters: bool = False,
                 check_reduction: bool = False, gradient_as_bucket_view: bool = True, static_graph: bool = False,
                 delay_all_reduce_named_params=None, param_to_hook_all_reduce=None, mixed_precision=None,
                 device_mesh=None, skip_all_reduce_unused_params: bool = False, bucket_cap_mb_list=None,
                 batched_grad_copy: bool = False, forward_sync_buffers: bool | None = None, *,
                 overlap: bool = True, naive: bool = False, strict: bool = False,
                 parameters_and_buffers_to_ignore=(), step_guard: bool = True):
        given = dict(locals())
        super().__init__()
        for name, only in _NOT_YET.items():
            if given[name] is not only:
                raise NotImplementedError(f"DistributedDataParallel({name}={given[name]!r}) is not supported yet; "
                                          f"only {name}={only!r} is")
        if device_ids or output_device is not None:
            raise NotImplementedError("DistributedDataParallel(device_ids=..., output_device=...) is not supported: move "
                                      "the module and its inputs to their device yourself, and leave both out")
        if dim != 0:
            raise NotImplementedError(f"DistributedDataParallel(dim={dim}) is not supported; inputs are not scattered")
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module is a {type(module).__name__}, not a torch.nn.Module")
        self.module = module
        options = _C.DistributedDataParallelOptions()
        options.bucket_cap_mb = bucket_cap_mb
        per_step = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers
        options.broadcast_buffers = True if per_step is None else bool(per_step)
        options.init_sync = init_sync
        options.find_unused_parameters = find_unused_parameters
        options.gradient_as_bucket_view = gradient_as_bucket_view
        options.static_graph = static_graph
        options.overlap, options.naive, options.strict = overlap, naive, strict
        options.parameters_and_buffers_to_ignore = [
            *parameters_and_buffers_to_ignore, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())]
        self.process_group = resolve(process_group)
        self._core = _C.DataParallel(list(module.named_parameters()), list(module.named_buffers()), self.process_group,
                                     options)
        self.register_load_state_dict_pre_hook(_insert_prefix)
        if step_guard and self.process_group.size() > 1:
            guard_steps(self)

    def forward(self, *args, **kwargs):
        if self._core.wants_buffers():
            self._core.before_forward(list(self.module.named_buffers()))
        output = self.module(*args, **kwargs)
        if self._core.wants_outputs():
            self._core.after_forward(tensors_in(output))
        return output

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self.__dict__.get("_modules", ()):
                raise
            return getattr(self.module, name)

    @contextlib.contextmanager
    def no_sync(self, enabled: bool = True):
        """While it lasts, backwards accumulate locally and nothing is sent."""
        before = self._core.sync()
        if enabled:
            self._core.set_sync(False)
        try:
            yield
        finally:
            self._core.set_sync(before)

    def weight(self, mean_loss: torch.Tensor, n: float) -> torch.Tensor:
        """`mean_loss`, a mean over `n` samples, made ready for a true average: the gradients become those of the mean
        over the union of all ranks' (and accumulated micro-batches') samples. n may be 0 on a rank."""
        return self._core.weight(mean_loss, n)

    def has_unsynchronised_gradients(self) -> bool:
        """Whether gradients accumulated under `no_sync` wait for a synchronisation."""
        return self._core.has_unsynchronised_gradients()

    def sync_grads(self) -> None:
        """Synchronises gradients accumulated under `no_sync` now, without a backward. Collective."""
        self._core.sync_grads()

    def digest(self) -> str:
        """SHA-256 of the bits of all parameters and buffers, in order."""
        return self._core.digest()

    def replicas_identical(self) -> bool:
        """Whether all ranks have the same digest. Collective."""
        return self._core.replicas_identical()

    @property
    def stats(self) -> _C.StepStats:
        """What the last synchronising backward cost this rank."""
        return self._core.last_step()

    @property
    def bucket_sizes(self) -> list[int]:
        """Bytes of each bucket of the present plan, in launch order."""
        return self._core.bucket_sizes()

    def set_tracing(self, on: bool) -> None:
        self._core.set_tracing(on)

    def take_trace(self) -> list[_C.TraceEvent]:
        """Events since tracing began or since the last call; see `unisono.write_chrome_trace`."""
        return self._core.take_trace()

    def state_dict(self, *args, **kwargs):
        """The module's own, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Takes the module's own keys and those of a file saved from torch's wrapper (`module.` before each)."""
        return self.module.load_state_dict(_without_prefix(state_dict, self.module), *args, **kwargs)


def _without_prefix(state_dict, module):
    own = module.state_dict().keys()
    if any(key in own for key in state_dict) or not any(key.startswith("module.") for key in state_dict):
        return state_dict
    plain = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        plain._metadata = dict(state_dict._metadata)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(plain, "module.")
    return plain


def _insert_prefix(wrapper, state_dict, prefix, *_):
    """For a wrapper inside another module, whose loading walks through `module` by name."""
    own = wrapper.module.state_dict().keys()
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if key[len(prefix):] in own:
            state_dict[f"{prefix}module.{key[len(prefix):]}"] = state_dict.pop(key)
