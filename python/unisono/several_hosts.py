"""Groups of ranks that meet in a store: shared memory where all share a host, else Gloo between hosts."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono import _C
from unisono.errors import TimeoutError
from unisono.hosts import Card, group_by_host, place_of_process


def meet(store, rank: int, size: int, timeout: timedelta) -> _C.ProcessGroup:
    """The fastest group for where the ranks are. Collective; each set of ranks needs keys of its own, e.g. a PrefixStore."""
    if size == 1:
        return _C.make_group_on_store(store, rank, size, timeout)

    def exchange(what, value):
        return _exchange(store, rank, size, timeout, what, value)

    if len(set(exchange("place", place_of_process()))) == 1:  # attaching to each other's memory is the proof
        return _C.make_group_on_store(store, rank, size, timeout)
    card = Card()
    try:
        cards = exchange("card", card.shown())
        hosts = group_by_host(exchange("neighbours", card.neighbours(cards)))
    finally:
        card.close()
    return _over_hosts(store, rank, size, timeout, hosts)


def gloo(store, name: str, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    return dist.ProcessGroupGloo(dist.PrefixStore(f"unisono/{name}", store), rank, size, timeout=timeout)


def gloo_group(store, name: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A Gloo group that torch.distributed does not know."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo(store, name, rank, size, timeout))
    return group


def _exchange(store, rank, size, timeout, what, value) -> list:
    keys = [f"unisono/{what}/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(value))
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [r for r in range(size) if not store.check([keys[r]])]
        raise TimeoutError(f"unisono, start, rank {rank} of {size}: missing rank{'s'[:len(missing) != 1]} "
                           f"{', '.join(map(str, missing))} after {timeout}. Was every rank started?") from error
    return [json.loads(store.get(key)) for key in keys]


def _over_hosts(store, rank, size, timeout, hosts):
    flat = gloo_group(store, "all", rank, size, timeout)
    own = next(ranks for ranks in hosts if rank in ranks)
    if max(map(len, hosts)) == 1:
        return _C.from_torch(flat)
    carriers, place, across = min(map(len, hosts)), own.index(rank), None
    if place < carriers:
        number = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        across = gloo_group(store, f"across/{place}", number, len(hosts), timeout)
    local = dist.PrefixStore(f"unisono/host/{own[0]}", store)
    return _C.make_hierarchical_group(flat, across, len(hosts), place, len(own), carriers, local)
