"""One way to train a model: a module of its own, wrapped or not, and its step."""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as torch_hooks

import unisono


class Groups:
    """Ours, and torch.distributed's over Gloo and over our backend; made in the same order on all ranks."""

    def __init__(self):
        self.unisono = unisono.init()
        dist.init_process_group("gloo")
        self.gloo = dist.group.WORLD
        self.torch_unisono = dist.new_group(backend="unisono")
        self.over_gloo = dist.new_group(backend="gloo")  # its calls go on in the background, past the others'


class Trainee:
    """`way` says how: {"impl": ..., "options": of the wrapper, "label": ...}. An impl is one of the JSON file's, or "bare"."""

    def __init__(self, model, way: dict, groups: Groups, optimize: bool):
        impl, options = way["impl"], dict(way.get("options", {}))
        transform = options.pop("transform", None)
        overlap_forward = options.pop("overlap_forward", None)
        torch_hook = options.pop("torch_hook", None)
        ours = groups.over_gloo if options.pop("over_gloo", False) else groups.unisono
        torch.manual_seed(1)
        self._model = model
        self._steps = True  # with an optimizer of its own after backward
        self._plain = model.make()
        torch.manual_seed(100 + groups.unisono.rank())
        self._batch = model.batch()
        self.context = contextlib.nullcontext
        self._module = self._plain
        if impl in ("unisono-ddp", "no-sync"):
            # "no-sync" steps on local gradients on purpose.
            self._module = unisono.DistributedDataParallel(self._plain, process_group=ours, step_guard=False,
                                                           **options)
            if transform:
                self._module.set_transform(getattr(unisono.transforms, transform)())
            if impl == "no-sync":
                self.context = self._module.no_sync
        elif impl in ("torch-ddp-gloo", "torch-ddp-unisono"):
            group = groups.gloo if impl == "torch-ddp-gloo" else groups.torch_unisono
            self._module = torch.nn.parallel.DistributedDataParallel(self._plain, process_group=group, **options)
            if torch_hook:
                self._module.register_comm_hook(group, getattr(torch_hooks, torch_hook))
        elif impl != "bare":
            raise ValueError(f"unknown impl {impl}")
        # A rate so small that the numbers stay what they are; the arithmetic is the same.
        self._optimizer = torch.optim.SGD(self._plain.parameters(), lr=1e-7) if optimize else None
        if overlap_forward is not None:
            self._module.step_in_backward(self._optimizer, overlap_forward=overlap_forward)
            self._steps = False

    def backward(self) -> None:
        self._model.loss(self._module, *self._batch).backward()

    def finish(self) -> None:
        if self._optimizer is not None and self._steps:
            self._optimizer.step()
        self._plain.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.backward()
        self.finish()

    def gradients_agree(self, groups: Groups) -> bool:
        """Whether all ranks have the same gradients after a backward, or the same parameters where it has used them up."""
        if not self._steps:
            return self._module.replicas_identical()
        gradients = torch.cat([p.grad.flatten() for p in self._plain.parameters() if p.grad is not None])
        others = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
        dist.all_gather(others, gradients, group=groups.gloo)
        return all(torch.equal(gradients, other) for other in others)
