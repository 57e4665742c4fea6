"""Optimizers that step inside backward, as soon as a bucket of gradients is averaged, or where its layer is used next."""

import contextlib
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
        self._settings = None  # of the groups when backward returned, where steps are left to take
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

    def take(self, parameters) -> None:
        chosen = {}
        for parameter in parameters:
            if (place := self._place.get(id(parameter))) is not None:
                i, g = place
                chosen.setdefault(i, {}).setdefault(g, []).append(parameter)
        with _stepping(self._ddp()):
            for i, groups in chosen.items():
                _step(self._optimizers[i], groups, self._settings[i] if self._settings else None)
        for parameter in parameters:
            if id(parameter) in self._place:
                parameter.grad = None


    def steps_left(self, any_left: bool) -> None:
        """Steps that are taken later are taken with the settings of now: a scheduler may go on before them."""
        self._settings = [[dict(group) for group in optimizer.param_groups]
                          for optimizer in self._optimizers] if any_left else None

    def finish_before_saving(self) -> None:
        """An optimizer's state is whole only when no step is left to take."""
        def finish(_optimizer):
            if (ddp := self._ddp()) is not None:
                ddp.finish_step()

        for optimizer in self._optimizers:
            optimizer.register_state_dict_pre_hook(finish)


@contextlib.contextmanager
def _stepping(ddp):
    """Tells the guard that these steps are no user's. `ddp` is None while it is being destroyed."""
    if ddp is None:
        yield
        return
    ddp._stepping = True
    try:
        yield
    finally:
        ddp._stepping = False


def _step(optimizer, groups, settings) -> None:
    """One step on some parameters: a copy that shares the state and the settings, those of now unless others are given."""
    part = copy.copy(optimizer)
    settings = settings or optimizer.param_groups
    part.param_groups = [{**settings[g], "params": parameters} for g, parameters in groups.items()]
    part.step()


def reads_without_operators(module) -> bool:
    """Whether a forward of `module` may run kernels of torch.compile, which get at parameters without an operator."""
    import torch

    return torch.compiler.is_compiling() or any(
        isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None for m in module.modules())


def _refuse_if_whole(optimizer) -> None:
    import torch

    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError("LBFGS evaluates the loss several times in one step, on all parameters together; it cannot "
                                   "step in backward")
