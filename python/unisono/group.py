"""Groups: unisono's own, and torch.distributed's behind the same contract."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from weakref import WeakKeyDictionary

import torch.distributed as dist

from unisono import _C
from unisono.errors import InvalidArgumentError

_default_group: _C.ProcessGroup | None = None
_of_torch: WeakKeyDictionary = WeakKeyDictionary()  # one of ours per torch group: they issue its calls in one order
_companions: WeakKeyDictionary = WeakKeyDictionary()  # the second groups, kept as long as the first
_first_of_robin: WeakKeyDictionary = WeakKeyDictionary()  # what round_robin() was given first

_second: WeakKeyDictionary = WeakKeyDictionary()  # how to make the second group of one that init() made over hosts


def _seconds(value: float | timedelta) -> timedelta:
    try:
        return value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError):
        raise InvalidArgumentError(f"a timeout is {value} s; it must be above 0 and below 1e9") from None


def countdown(timeout: timedelta) -> Callable[[], timedelta]:
    """Tells what is left of a time that begins now; a second where it has passed, for what needs no waiting."""
    end = monotonic() + timeout.total_seconds()
    return lambda: timedelta(seconds=max(1.0, end - monotonic()))


def init(transport: str = "auto", rank: int = -1, size: int = -1, timeout: float | timedelta = 1800.0,
         start_timeout: float | timedelta = 300.0, store=None, prefix: str = "unisono") -> _C.ProcessGroup:
    """Makes this process's group from its environment: `unisono run`, torchrun, mpirun, srun, or a world of one.

    `transport` is "auto" (shared memory on one host, else two levels over Gloo, or MPI where the launcher is MPI's and tells no
    address), "shm", "serial", "gloo" or "mpi". The ranks meet in `store` if given (a torch.distributed store, or another group's
    `store`), under keys that begin with `prefix`: one for each set of ranks on the same store. Collective; blocks until all ranks are
    there, at most `start_timeout` seconds. The newest group is the one that `DistributedDataParallel` takes when it is given none.
    """
    global _default_group
    if store is not None and not isinstance(store, _C.Store):
        store = _C.make_store(store)
    arguments = (transport, rank, size, _seconds(timeout), _seconds(start_timeout), store, prefix)
    over_hosts = _init_over_hosts(*arguments)
    _default_group = _C.init(*arguments) if over_hosts is None else over_hosts
    return _default_group


@atexit.register
def _forget_default() -> None:
    """The group's threads end before Python does: one that lets go of a tensor later would find no interpreter."""
    global _default_group
    _default_group = None


def _init_over_hosts(transport, rank, size, timeout, start_timeout, store, prefix) -> _C.ProcessGroup | None:
    """The group of a run that spans hosts, or that asks for Gloo; else nothing."""
    if transport not in ("auto", "gloo"):
        return None
    left = countdown(start_timeout)
    torch_store, rank, size = _C.meet_over_hosts(transport, rank, size, start_timeout, store, prefix)
    if torch_store is None:
        return None
    from unisono.several_hosts import gloo_group, meet

    def make(name, start_timeout):
        if transport == "gloo":
            return _C.from_torch(gloo_group(torch_store, name, rank, range(size), timeout, start_timeout))
        return meet(dist.PrefixStore(name, torch_store), rank, size, timeout, start_timeout)

    group = make("first", left())
    _second[group] = lambda: make("second", start_timeout)
    return group


def round_robin(groups) -> _C.ProcessGroup:
    """One group made of several groups of the same ranks, unisono's or torch.distributed's: its calls take turns, so that as many are under
    way at once over engines that serve one at a time. Local. Nobody else may use the groups meanwhile."""
    groups = list(groups)
    made = _C.make_round_robin_group([resolve(group) for group in groups])
    _first_of_robin[made] = groups[0]
    return made


def of_keywords(process_group, device_mesh) -> _C.ProcessGroup:
    """From DistributedDataParallel's two ways to name a group."""
    if device_mesh is None:
        return resolve(process_group)
    if process_group is not None:
        raise ValueError("process_group and device_mesh are both given; one names the group")
    if device_mesh.ndim != 1:
        raise ValueError(f"device_mesh has {device_mesh.ndim} dimensions; give the one along which replicas lie, "
                         f"device_mesh['name']")
    return resolve(device_mesh.get_group(mesh_dim=0))


def resolve(group) -> _C.ProcessGroup:
    """A unisono group from one, from a torch.distributed group, or from nothing: the default of either."""
    if isinstance(group, _C.ProcessGroup):
        return group
    if dist.is_available():
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if isinstance(group, dist.ProcessGroup):
            if group not in _of_torch:
                _of_torch[group] = _C.from_torch(group)
            return _of_torch[group]
    if group is None:
        return _default_group or init()
    raise TypeError(f"process_group is a {type(group).__name__}; it may be a unisono group, a torch.distributed group "
                    "or None")


def existing(group) -> _C.ProcessGroup | None:
    """`resolve`, but nothing for None where there is no default group yet."""
    if group is None and _default_group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    return resolve(group)


def set_companion(process_group, companion) -> None:
    """Gives a group the second group of the same ranks that SyncBatchNorm runs on; both may be unisono's or
    torch.distributed's. Local, before the first forward. Without it one is made."""
    ours = resolve(process_group)
    _C.set_companion(ours, resolve(companion))
    _companions[ours] = companion


def with_companion(process_group) -> _C.ProcessGroup:
    """`resolve`, and a companion for groups whose own cannot be made below Python. Collective the first time."""
    ours = resolve(process_group)
    if ours.size() == 1 or ours.name == "shm" or ours in _companions:
        return ours
    if ours in _second:
        set_companion(ours, _second[ours]())
        return ours
    if ours in _first_of_robin:
        with_companion(_first_of_robin[ours])
        return ours
    theirs = dist.group.WORLD if process_group is None else process_group
    if isinstance(theirs, dist.ProcessGroup):
        from unisono.hosts import new_group_like

        set_companion(ours, new_group_like(theirs, timedelta(seconds=ours.timeout)))
    return ours


def viable_transports(size: int = 2) -> list[tuple[str, bool, str]]:
    """(transport, viable, why not) for `size` ranks on this machine, in order of preference."""
    return _C.viable_transports(size)
