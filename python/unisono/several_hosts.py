"""Groups of ranks that meet in a store: shared memory where all share a host, else Gloo between hosts."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from unisono import _C
from unisono.errors import TimeoutError
from unisono.hosts import over_hosts


def meet(store, rank: int, size: int, timeout: timedelta) -> _C.ProcessGroup:
    """The fastest group for where the ranks are. Collective; each set of ranks needs keys of its own, e.g. a PrefixStore."""
    if size == 1:
        return _C.make_group_on_store(store, rank, size, timeout)
    hosts = _C.find_hosts(lambda what, text: _exchange(store, rank, size, timeout, what, text))
    if len(hosts) == 1:
        return _C.make_group_on_store(store, rank, size, timeout)

    def make(name, ranks):
        return gloo_group(store, name, ranks.index(rank), len(ranks), timeout) if rank in ranks else None

    return over_hosts(hosts, rank, make, store)


def gloo(store, name: str, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    return dist.ProcessGroupGloo(dist.PrefixStore(f"unisono/{name}", store), rank, size, timeout=timeout)


def gloo_group(store, name: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A Gloo group that torch.distributed does not know."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo(store, name, rank, size, timeout))
    return group


def _exchange(store, rank: int, size: int, timeout: timedelta, what: str, text: str) -> list[str]:
    keys = [f"unisono/{what}/{r}" for r in range(size)]
    store.set(keys[rank], text)
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [r for r in range(size) if not store.check([keys[r]])]
        raise TimeoutError(f"unisono, start, rank {rank} of {size}: missing rank{'s'[:len(missing) != 1]} "
                           f"{', '.join(map(str, missing))} after {timeout}. Was every rank started?") from error
    return [store.get(key).decode() for key in keys]
