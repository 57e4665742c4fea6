"""What `torch.distributed.init_process_group("unisono")` makes: shared memory on one host, two levels over Gloo on several."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono import _C
from unisono.errors import TimeoutError
from unisono.hosts import Card, group_by_host, place_of_process


def create(store, rank: int, size: int, timeout: timedelta):
    """A torch backend of the ranks that meet in `store`. Collective. Which ranks share a host they find out by themselves."""
    if size == 1:
        return _C.create_torch_backend(store, rank, size, timeout)

    def exchange(what, value):
        return _exchange(store, rank, size, timeout, what, value)

    if len(set(exchange("place", place_of_process()))) == 1:  # attaching to each other's memory is the proof
        return _C.create_torch_backend(store, rank, size, timeout)
    card = Card()
    try:
        cards = exchange("card", card.shown())
        hosts = group_by_host(exchange("neighbours", card.neighbours(cards)))
    finally:
        card.close()
    return _over_hosts(store, rank, size, timeout, hosts)


def _exchange(store, rank, size, timeout, what, value) -> list:
    keys = [f"unisono/{what}/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(value))
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [r for r in range(size) if not store.check([keys[r]])]
        raise TimeoutError(f"init_process_group(\"unisono\"), rank {rank} of {size}: missing rank{'s'[:len(missing) != 1]} "
                           f"{', '.join(map(str, missing))} after {timeout}. Was every rank started?") from error
    return [json.loads(store.get(key)) for key in keys]


def _gloo(store, name, rank, size, timeout):
    return dist.ProcessGroupGloo(dist.PrefixStore(f"unisono/{name}", store), rank, size, timeout=timeout)


def _as_group(backend, store, rank, size):
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def _over_hosts(store, rank, size, timeout, hosts):
    flat = _as_group(_gloo(store, "all", rank, size, timeout), store, rank, size)
    beside = _gloo(store, "messages", rank, size, timeout)
    own = next(ranks for ranks in hosts if rank in ranks)
    if max(map(len, hosts)) == 1:
        return _C.make_torch_backend(_C.from_torch(flat), beside)
    carriers, place, across = min(map(len, hosts)), own.index(rank), None
    if place < carriers:
        number = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        across = _as_group(_gloo(store, f"across/{place}", number, len(hosts), timeout), store, number, len(hosts))
    local = dist.PrefixStore(f"unisono/host/{own[0]}", store)
    group = _C.make_hierarchical_group(flat, across, len(hosts), place, len(own), carriers, local)
    return _C.make_torch_backend(group, beside)
