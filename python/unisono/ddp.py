"""The module wrapper: torch's keyword arguments, unisono's reducer."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict

import torch

from unisono import _C, errors, precision, transforms
from unisono.backward_optimizer import BackwardOptimizers, reads_without_operators
from unisono.buffers import BufferMethods, policy_of
from unisono.changes import Registrations
from unisono.changes import sparse_parameters as _sparse_embeddings
from unisono.device import place_of, to_device
from unisono.group import existing, of_keywords
from unisono.guard import guard_steps
from unisono.outputs import tensors_in
from unisono.sync_batch_norm import SyncBatchNorm


class DistributedDataParallel(BufferMethods, torch.nn.Module):
    """Keeps the replicas of `module` on all ranks in step: after every backward, the gradient of every parameter is
    the mean over ranks, bit for bit the same on all of them.

    Takes the keyword arguments of `torch.nn.parallel.DistributedDataParallel` and, beyond them, `strict` (raise at
    the end of a backward in which a parameter received no gradient), `parameters_and_buffers_to_ignore`,
    `buffer_policy` ("rank0": the buffers of all ranks become rank 0's; "mean": floating ones their mean),
    `step_guard` (an optimizer that steps on gradients which no synchronisation has averaged raises),
    `uneven_accumulation` (ranks may sum up different numbers of backwards), `check_finite` (raise when a gradient holds an
    infinity or NaN, naming parameter and rank), `check_replicas` (compare a few elements of the parameters in every step; by
    default as `step_guard`), `sparse_parameters` (names, beyond those of embeddings with sparse=True), and for measuring
    `overlap` and `naive`.
    `process_group` is a unisono group, a torch.distributed group, or None. `mixed_precision` is a
    `unisono.MixedPrecision`, or torch's. docs/differences.md lists what is not as in torch.
    """

    def __init__(self, module: torch.nn.Module, device_ids=None, output_device=None, dim: int = 0,
                 broadcast_buffers: bool | None = None, init_sync: bool = True, process_group=None,
                 bucket_cap_mb: float | None = None, find_unused_parameters: bool = False,
                 check_reduction: bool = False, gradient_as_bucket_view: bool = True, static_graph: bool = False,
                 delay_all_reduce_named_params=None, param_to_hook_all_reduce=None, mixed_precision=None,
                 device_mesh=None, skip_all_reduce_unused_params: bool = False, bucket_cap_mb_list=None,
                 batched_grad_copy: bool = False, forward_sync_buffers: bool | None = None, *,
                 overlap: bool = True, naive: bool = False, strict: bool = False,
                 parameters_and_buffers_to_ignore=(), step_guard: bool = True, uneven_accumulation: bool = False,
                 check_finite: bool = False, check_replicas: bool | None = None, sparse_parameters=(), buffer_policy: str = "rank0"):
        parameters_and_buffers_to_ignore = tuple(parameters_and_buffers_to_ignore)  # it may be a generator
        self._keywords = {name: value for name, value in locals().items()
                          if name not in ("self", "module", "process_group", "device_mesh", "__class__")}
        super().__init__()
        if dim != 0:
            raise NotImplementedError(f"DistributedDataParallel(dim={dim}) is not supported; inputs are not scattered")
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module is a {type(module).__name__}, not a torch.nn.Module")
        _refuse_lazy(module)
        self.module = module
        self._device = place_of(module, device_ids, output_device)
        mixed, self._compute = precision.of_keyword(mixed_precision, module)
        precision.convert(module, mixed)
        options = _C.DistributedDataParallelOptions()
        options.bucket_cap_mb = bucket_cap_mb
        per_step = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers
        options.broadcast_buffers = True if per_step is None else bool(per_step)
        options.init_sync = init_sync
        options.buffer_policy = policy_of(buffer_policy)
        options.find_unused_parameters = find_unused_parameters
        options.gradient_as_bucket_view = gradient_as_bucket_view
        options.static_graph = static_graph
        options.overlap, options.naive, options.strict = overlap, naive, strict
        options.uneven_accumulation = uneven_accumulation
        options.check_finite = check_finite
        options.check_replicas = step_guard if check_replicas is None else check_replicas
        options.parameters_and_buffers_to_ignore = [
            *parameters_and_buffers_to_ignore, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())]
        options.sparse_parameters = [*sparse_parameters, *_sparse_embeddings(module)]
        options.delayed_parameters = _names_of_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        options.bucket_cap_mb_list = list(bucket_cap_mb_list or ())
        if mixed.reduce is not None:
            options.set_reduce_dtype(mixed.reduce)
        self.process_group = of_keywords(process_group, device_mesh)
        self._registrations = Registrations()
        self._stepping = False
        self._overlaps = False
        self._core = _C.DataParallel(*self._tensors(), self.process_group, options)
        self.register_load_state_dict_pre_hook(_insert_prefix)
        self.step_guard = step_guard
        if step_guard:
            guard_steps(self, options.parameters_and_buffers_to_ignore)

    def forward(self, *args, **kwargs):
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function("DistributedDataParallel.forward"):
                return self._forward(args, kwargs)
        return self._forward(args, kwargs)

    def _forward(self, args, kwargs):
        if self._registrations.seen() or self._core.parameters_changed():
            _refuse_lazy(self.module)
            self._core.follow(*self._tensors())
        if self.module.training and self._core.wants_buffers():
            self._core.before_forward(list(self.module.named_buffers()))
        if self._device is not None:
            args, kwargs = to_device((args, kwargs), self._device)
        if self._overlaps and reads_without_operators(self.module):
            self._core.finish_step()
        output = self._compute(args, kwargs) if self._compute is not None else self.module(*args, **kwargs)
        if self._overlaps:
            self._core.check_step()
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

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True,
             throw_on_early_termination: bool = False):
        """Ranks may take different numbers of steps inside. No message is sent for it; a rank that leaves waits, and takes
        part with nothing, until no rank has inputs. Then all have the state of those that took the last step."""
        if not enable:
            yield
            return
        if not throw_on_early_termination:
            _refuse_torch_sync_batch_norm(self.module)
        self._core.begin_join(divide_by_initial_world_size, throw_on_early_termination)
        try:
            yield
        except BaseException:
            self._core.cancel_join()
            raise
        self._core.follow_buffers(list(self.module.named_buffers()))
        self._core.finish_join()

    def set_group(self, process_group) -> None:
        """Goes on with another group, of other ranks perhaps, after the old one has failed or to take in new ranks: what the
        constructor does, in a wrapper that lives. All ranks get the parameters and buffers of rank 0, `.grad` becomes None; the
        optimizer's state is the caller's to bring to all ranks. SyncBatchNorm layers over the old group get the new one.
        Collective over the new group; newcomers construct their wrapper meanwhile. When it raises, call it again with another group."""
        group = of_keywords(process_group, None)
        self._core.set_group(group, *self._tensors())
        for layer in self.module.modules():
            if isinstance(layer, SyncBatchNorm) and existing(layer.process_group) is self.process_group:
                layer.process_group = group if process_group is None else process_group
        self.process_group = group

    def set_transform(self, transform: transforms.GradientTransform | None) -> None:
        """Gradients travel through `transform` from the next backward on; None: as they are. The same on all ranks."""
        self._core.set_transform(transform)

    def register_comm_hook(self, state, hook, yields: str = "mean") -> None:
        """torch's communication hooks, unchanged: `hook(state, bucket)` returns a Future of the reduced bucket."""
        self._core.set_transform(transforms.hook(state, hook, yields))

    def step_in_backward(self, *optimizers, max_norm: float | None = None, overlap_forward: bool = False) -> None:
        """From the next backward on `optimizers` step inside it, on each bucket as soon as it is averaged; `.grad` is None
        afterwards, so that a step() of their own finds nothing to do. With `max_norm` they step at the end of the backward,
        gradients clipped to that common 2-norm. With `overlap_forward` backward does not wait for the last buckets: a parameter's
        step is taken before the next operator that reads it, with the learning rate that it had when backward returned, and over a
        slow link the first layers' buckets come first. Without optimizers: no more."""
        if not optimizers:
            self._core.set_step_in_backward(None)
            self._overlaps = False
            return
        steps = BackwardOptimizers(self, optimizers)
        # Called from within a compiled forward they would be compiled, on each rank for the parameters of the moment.
        take, steps_left = map(torch.compiler.disable, (steps.take, steps.steps_left))
        self._core.set_step_in_backward(take, max_norm, overlap_forward, steps_left if overlap_forward else None)
        self._overlaps = overlap_forward
        if overlap_forward:
            steps.finish_before_saving()

    def finish_step(self) -> None:
        """Takes the steps that `overlap_forward` has left to the next forward, and raises what went wrong in them. Needed only before
        something reads parameters without an operator of torch: a raw pointer, a kernel compiled elsewhere."""
        self._core.finish_step()

    def digest(self) -> str:
        """SHA-256 of the bits of all parameters and buffers, in order."""
        return self._core.digest(*self._tensors())

    def replicas_identical(self) -> bool:
        """Whether all ranks have the same digest. Collective."""
        return self._core.replicas_identical(*self._tensors())

    def _tensors(self):
        """The module's parameters and buffers, by name, as they are now."""
        return list(self.module.named_parameters()), list(self.module.named_buffers())

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

    def __deepcopy__(self, memo):
        """A wrapper of a copy of the module over the same group. Collective."""
        keywords = {**self._keywords, "delay_all_reduce_named_params": None, "param_to_hook_all_reduce": None}
        return type(self)(copy.deepcopy(self.module, memo), process_group=self.process_group, **keywords)

    def __getstate__(self):
        raise TypeError("DistributedDataParallel holds a process group and cannot be pickled; pickle ddp.module, or save "
                        "ddp.state_dict()")

    def state_dict(self, *args, **kwargs):
        """The module's own, without a prefix."""
        self._core.finish_step()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Takes the module's own keys and those of a file saved from torch's wrapper (`module.` before each)."""
        return self.module.load_state_dict(_without_prefix(state_dict, self.module), *args, **kwargs)


def _refuse_torch_sync_batch_norm(module) -> None:
    """Its collectives in forward would wait for a rank that runs no forward; ours are answered by such a rank."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            raise errors.InvalidArgumentError(f"join(): '{name}' is torch's SyncBatchNorm, which needs every rank in every forward; "
                                              f"convert the module with unisono.SyncBatchNorm.convert_sync_batchnorm, or give "
                                              f"join(throw_on_early_termination=True), which ends on all ranks at once")


def _refuse_lazy(module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise errors.InvalidArgumentError(f"'{name}' of a lazy module has no shape yet; run one forward of the module "
                                              f"before wrapping it")


def _names_of_delayed(named_parameters, trigger) -> list[str]:
    if (named_parameters is None) != (trigger is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce are given together or not at all")
    return [name for name, _ in named_parameters or ()]


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
