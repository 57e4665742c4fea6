"""Optimizers that step inside backward, as soon as a bucket of gradients is averaged, or where its layer is used next."""

import contextlib
import types
import weakref

import torch

from unisono.errors import InvalidArgumentError

_ABSENT = object()


class BackwardOptimizers:
    """The step of `optimizers`, a few parameters at a time. State, settings and schedulers stay the optimizers' own."""

    def __init__(self, ddp, optimizers):
        names = {id(p): name for name, p in ddp.module.named_parameters()}
        self._ddp = weakref.ref(ddp)
        self._optimizers = optimizers
        self._places = _Places(optimizers)
        self._settings = None  # of each optimizer when backward returned, where steps are left to take
        self._written = _Written(self._ddp)
        for i, optimizer in enumerate(optimizers):
            _refuse_if_whole(optimizer)
            _refuse_references(optimizer)
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if id(parameter) not in names:
                    raise InvalidArgumentError(f"{type(optimizer).__name__} holds a parameter of shape "
                                               f"{tuple(parameter.shape)} that is not the wrapped module's; its step "
                                               f"cannot be taken in this module's backward")
                if self._places.of(parameter)[0] != i:
                    raise InvalidArgumentError(f"parameter '{names[id(parameter)]}' is in two optimizers")

    def take(self, parameters) -> None:
        ddp = self._ddp()
        if self._settings is None:
            self._in_backward()
            self._places.refresh(parameters)
        self._written.next_part(parameters)
        chosen = {}
        for parameter in parameters:
            if (place := self._places.of(parameter)) is not None:
                i, g = place
                chosen.setdefault(i, {}).setdefault(g, []).append(parameter)
        with _stepping(ddp):
            for i, groups in chosen.items():
                self._step(i, groups)
        for parameter in parameters:
            if self._places.of(parameter) is not None:
                parameter.grad = None

    def steps_left(self, any_left: bool) -> None:
        """Steps that are taken later are taken with the settings of now: a scheduler may go on before them."""
        if any_left:
            self._in_backward()
            self._places.read()
        self._settings = list(map(_copied_settings, self._optimizers)) if any_left else None

    def _in_backward(self) -> None:
        for optimizer in self._optimizers:
            _refuse_if_whole(optimizer)
            optimizer._opt_called = True  # what a scheduler looks for

    def _step(self, i, groups) -> None:
        """One step on some parameters, by a part: an optimizer with the attributes, the state and the settings of the whole one."""
        optimizer = self._optimizers[i]
        settings = self._settings[i] if self._settings else _settings_of(optimizer)
        befores = {g: {**self._written.before((i, g), settings[g]), "params": parameters} for g, parameters in groups.items()}
        part_groups = {g: dict(before) for g, before in befores.items()}
        part = object.__new__(type(optimizer))
        attributes = self._written.before((i, None), settings[None])
        attributes.pop("step", None)  # a scheduler's; it would step the whole optimizer
        attributes.update(param_groups=list(part_groups.values()), _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
        for name, value in attributes.items():
            if isinstance(value, types.MethodType) and value.__self__ is optimizer:
                attributes[name] = types.MethodType(value.__func__, part)
        vars(part).update(attributes)
        part.step()
        self._written.keep((i, None), attributes, vars(part), vars(optimizer))
        for g, before in befores.items():
            self._written.keep((i, g), before, part_groups[g], optimizer.param_groups[g])

    def finish_before_saving(self) -> None:
        """An optimizer's state is whole only when no step is left to take."""
        def finish(_optimizer):
            if (ddp := self._ddp()) is not None:
                ddp.finish_step()

        for optimizer in self._optimizers:
            optimizer.register_state_dict_pre_hook(finish)


def _settings_of(optimizer) -> dict:
    """Its groups by index; its attributes under None."""
    return {None: vars(optimizer), **dict(enumerate(optimizer.param_groups))}


def _copied_settings(optimizer) -> dict:
    """The same as they are now. A scheduler writes into a learning rate that is a tensor."""
    groups = ({name: value.clone() if torch.is_tensor(value) else value for name, value in group.items()}
              for group in optimizer.param_groups)
    return {None: dict(vars(optimizer)), **dict(enumerate(groups))}


class _Places:
    """In which optimizer and which of its groups a parameter is. Groups may be added, for layers that are unfrozen, and removed."""

    def __init__(self, optimizers):
        self._optimizers = optimizers
        self.read()

    def of(self, parameter):
        """(index of the optimizer, of its group); None where none has it."""
        return self._place.get(id(parameter))

    def refresh(self, parameters) -> None:
        """To be called before `of` is asked for these."""
        if self._lengths() != self._known or any(id(parameter) not in self._place for parameter in parameters):
            self.read()

    def read(self) -> None:
        self._known = self._lengths()
        self._place = {id(parameter): (i, g) for i, optimizer in enumerate(self._optimizers)
                       for g, group in enumerate(optimizer.param_groups) for parameter in group["params"]}

    def _lengths(self) -> list:
        return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self._optimizers]


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


class _Written:
    """What a step writes into an optimizer's attributes and settings (a count of its steps): the optimizer keeps it, and the
    other parts of the same step begin with what was there before, as if there were one step."""

    def __init__(self, ddp):
        self._ddp = ddp
        self._before = {}  # (index of the optimizer, of its group or None) -> names and values
        self._taken = set()
        self._last_step = None

    def next_part(self, parameters) -> None:
        """Forgets what the step before this one has written. A backward that failed is known by a parameter that comes again."""
        ids = {id(parameter) for parameter in parameters}
        if not self._taken.isdisjoint(ids) or (self._before and self._last_ended() != self._last_step):
            self._before.clear()
            self._taken.clear()
        self._taken |= ids

    def _last_ended(self):
        """Which backward ended last. A wrapper that is being destroyed takes steps that are left of the one in progress."""
        ddp = self._ddp()
        return self._last_step if ddp is None else ddp._core.last_step().step

    def before(self, place, values) -> dict:
        values = {**values, **self._before.get(place, {})}
        return {name: value for name, value in values.items() if value is not _ABSENT}

    def keep(self, place, before, after, target) -> None:
        for name, value in after.items():
            if value is not before.get(name, _ABSENT):
                self._last_step = self._last_ended()
                self._before.setdefault(place, {}).setdefault(name, before.get(name, _ABSENT))
                target[name] = value


def reads_without_operators(module) -> bool:
    """Whether a forward of `module` may run kernels of torch.compile, which get at parameters without an operator."""
    return torch.compiler.is_compiling() or any(
        isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None for m in module.modules())


def _refuse_if_whole(optimizer) -> None:
    """Where the step of a part would not be a part of the step. Asked again in every backward: hooks may come later."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError("LBFGS evaluates the loss several times in one step, on all parameters together; it cannot "
                                   "step in backward")
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_step_{when}_hooks"):
            raise InvalidArgumentError(f"{kind} has a step {when}-hook, which would run for a few parameters at a time; in backward "
                                       f"it cannot step with it. Remove the hook, or step after backward; to clip gradients give "
                                       f"step_in_backward max_norm")
    step = vars(optimizer).get("step")
    if step is not None and not (hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step):
        raise InvalidArgumentError(f"{kind} has a step() of its own on the object, which steps on all parameters together; it cannot "
                                   f"step in backward. Override step() in a subclass")


def _refuse_references(optimizer) -> None:
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.optim.Optimizer) or id(item) in parameters:
                what = "parameters" if id(item) in parameters else "an optimizer"
                raise InvalidArgumentError(f"{type(optimizer).__name__} keeps {what} in its attribute '{name}', beside param_groups; "
                                           f"a step on a few parameters in backward would reach others through it")
