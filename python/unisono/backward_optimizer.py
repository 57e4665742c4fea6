"""Optimizers that step inside backward, as soon as a bucket of gradients is averaged."""

import copy
import weakref

from unisono.errors import InvalidArgumentError


class BackwardOptimizers:
    """The step of `optimizers`, a few parameters at a time. State, settings and schedulers stay the optimizers' own."""

    def __init__(self, ddp, optimizers):
        names = {id(p): name for name, p in ddp.module.named_parameters()}
        self._ddp = weakref.ref(ddp)
        self._optimizers = optimizers
        self._place = {}  # id of a parameter -> (index of its optimizer, of its group)
        for i, optimizer in enumerate(optimizers):
            _refuse_if_whole(optimizer)
            for g, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) not in names:
                        raise InvalidArgumentError(f"{type(optimizer).__name__} holds a parameter of shape "
                                                   f"{tuple(parameter.shape)} that is not the wrapped module's; its step "
                                                   f"cannot be taken in this module's backward")
                    if id(parameter) in self._place:
                        raise InvalidArgumentError(f"parameter '{names[id(parameter)]}' is in two optimizers")
                    self._place[id(parameter)] = i, g

    def __call__(self, parameters) -> None:
        chosen = {}
        for parameter in parameters:
            if (place := self._place.get(id(parameter))) is not None:
                i, g = place
                chosen.setdefault(i, {}).setdefault(g, []).append(parameter)
        ddp = self._ddp()
        ddp._stepping = True
        try:
            for i, groups in chosen.items():
                _step(self._optimizers[i], groups)
        finally:
            ddp._stepping = False
        for parameter in parameters:
            if id(parameter) in self._place:
                parameter.grad = None


def _step(optimizer, groups) -> None:
    """One step on some parameters: a copy that shares the state and the settings of now."""
    part = copy.copy(optimizer)
    part.param_groups = [{**optimizer.param_groups[g], "params": parameters} for g, parameters in groups.items()]
    part.step()


def _refuse_if_whole(optimizer) -> None:
    import torch

    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError("LBFGS evaluates the loss several times in one step, on all parameters together; it cannot "
                                   "step in backward")
