"""Groups of ranks that meet in a store: shared memory where all share a host, else Gloo between hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono import _C
from unisono.errors import Error, InvalidArgumentError, TimeoutError
from unisono.group import countdown
from unisono.hosts import over_hosts


def meet(store, rank: int, size: int, timeout: timedelta, start_timeout: timedelta) -> _C.ProcessGroup:
    """The fastest group for where the ranks are. Collective; each set of ranks needs keys of its own, e.g. a PrefixStore. Blocks at most
    `start_timeout`; `timeout` is that of the group's calls."""
    left = countdown(start_timeout)
    hosts = [(0,)] if size == 1 else _C.find_hosts(lambda what, text: _exchange(store, rank, size, left(), what, text))
    if len(hosts) == 1:
        return _C.init("serial" if size == 1 else "shm", rank, size, timeout, left(), _C.make_store(store))

    def make(name, ranks):
        return gloo_group(store, name, rank, ranks, timeout, left()) if rank in ranks else None

    return over_hosts(hosts, rank, make, store)


def gloo(store, name: str, rank: int, ranks: Sequence[int], timeout: timedelta, start_timeout: timedelta) -> dist.Backend:
    """Gloo between `ranks`, of which this one is `rank`; they are numbered anew in this order. Its send and recv keep to `start_timeout`
    afterwards too, for Gloo tells them no other."""
    try:
        made = dist.ProcessGroupGloo(dist.PrefixStore(f"unisono/{name}", store), ranks.index(rank), len(ranks), timeout=start_timeout)
    except RuntimeError as error:
        raise _not_started(rank, ranks, str(error).partition("\n")[0]) from error
    made.set_timeout(timeout)
    return made


def gloo_group(store, name: str, rank: int, ranks: Sequence[int], timeout: timedelta, start_timeout: timedelta) -> dist.ProcessGroup:
    """A Gloo group that torch.distributed does not know."""
    group = dist.ProcessGroup(store, ranks.index(rank), len(ranks))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO,
                            gloo(store, name, rank, ranks, timeout, start_timeout))
    return group


def _not_started(rank: int, ranks: Sequence[int], reason: str) -> Error:
    what = f"unisono, start, rank {rank}: Gloo did not start between ranks {', '.join(map(str, ranks))}: {reason}. "
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    here = [name for _, name in socket.if_nameindex()]
    if names and not set(names.split(",")) <= set(here):
        return InvalidArgumentError(f"{what}GLOO_SOCKET_IFNAME={names}, but the interfaces of this host are {', '.join(here)}.")
    return TimeoutError(f"{what}Was one of them ended meanwhile? Can their hosts reach each other by the interface of GLOO_SOCKET_IFNAME, "
                        "or, where it is not set, by what the host's name resolves to?")


def _exchange(store, rank: int, size: int, timeout: timedelta, what: str, text: str) -> list[str]:
    keys = [f"unisono/{what}/{r}" for r in range(size)]
    store.set(keys[rank], text)
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [r for r in range(size) if not store.check([keys[r]])]
        raise TimeoutError(f"unisono, start, rank {rank} of {size}: missing rank{'s'[:len(missing) != 1]} "
                           f"{', '.join(map(str, missing))} after {timeout.total_seconds():.1f} s. Was every rank started?") from error
    return [store.get(key).decode() for key in keys]
