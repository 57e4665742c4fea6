"""Groups of two levels: shared memory inside a host, torch.distributed between hosts."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from weakref import finalize

import torch.distributed as dist

from unisono import _C
from unisono.group import _second, _seconds

Hosts = list[tuple[int, ...]]  # the ranks of each host, hosts in the order of their first ranks


def hosts_of(process_group=None) -> Hosts:
    """The ranks of each host of a torch.distributed group, hosts in the order of their first rank. Ranks share a host when each can open
    the other's memory. The variable UNISONO_HOST_PART splits a host further (one part per NUMA domain, or in tests). Collective."""

    def exchange(_, text):
        texts = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(texts, text, group=process_group)
        return texts

    return _C.find_hosts(exchange)


def over_hosts(hosts: Hosts, rank: int, make: Callable[[str, list[int]], dist.ProcessGroup | None], store: dist.Store, *,
               ordered: bool = False) -> _C.ProcessGroup:
    """The group of the ranks of several hosts. `make(name, ranks)` gives a torch.distributed group of these ranks, None where this rank is
    none of them; ranks ascend, and it is asked for the same groups in the same order on all ranks. The ranks of a host meet in `store`."""
    everyone = make("all", sorted(rank for ranks in hosts for rank in ranks))
    if max(map(len, hosts)) == 1:
        return _C.make_ordered_group(everyone) if ordered else _C.from_torch(everyone)
    across = [make(f"across/{place}", sorted(ranks)) for place, ranks in enumerate(zip(*hosts, strict=False))]
    leaders = make("leaders", [ranks[0] for ranks in hosts])
    own = next(ranks for ranks in hosts if rank in ranks)
    return _C.make_hierarchical_group(everyone, next((group for group in across if group is not None), None), leaders, hosts,
                                      dist.PrefixStore(f"unisono/host/{own[0]}", store), ordered)


def hierarchical(process_group=None, timeout: float | timedelta = 1800.0) -> _C.ProcessGroup:
    """A group over all ranks of `process_group` (torch.distributed's default one) whose calls on CPU memory go through shared memory inside
    a host and over torch.distributed between hosts, each rank carrying a slice. With one host it is shared memory alone, with one rank
    per host torch.distributed alone. Collective over the ranks of `process_group`, and over no others."""
    group = _two_levels(process_group, _seconds(timeout), hosts_of(process_group))
    _second[group] = lambda: hierarchical(process_group, timeout)
    return group


def ordered(process_group=None, timeout: float | timedelta = 1800.0) -> _C.ProcessGroup:
    """A group over the ranks of a torch.distributed group whose sums have the bits of shared memory, whatever the engine, the topology
    and the size of messages. On two hosts whose ranks are halves of the balanced tree (0 to 3 and 4 to 7) it goes in two levels, whose
    sums are that tree's; else it is an all-to-all of slices, our tree's sum, an all-gather. Collective over the ranks of
    `process_group`, and over no others."""
    hosts = hosts_of(process_group)
    halves = len(hosts) == 2 and _C.follows_tree(hosts)
    group = _two_levels(process_group, _seconds(timeout), hosts if halves else None, ordered=True)
    _second[group] = lambda: ordered(process_group, timeout)
    return group


def _two_levels(process_group, timeout: timedelta, hosts: Hosts | None, *, ordered: bool = False) -> _C.ProcessGroup:
    everyone = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    backend = dist.get_backend_config(process_group)
    rank = dist.get_rank(process_group)
    name = _agreed_name(process_group)
    made = []

    def make(part, ranks, backend=backend):
        theirs = [everyone[r] for r in ranks]
        if len(everyone) == dist.get_world_size():
            group = dist.new_group(theirs, timeout, backend)
        elif rank in ranks:
            group = _new_group_of_members(f"{name}/{part}", theirs, timeout, backend)
        if rank not in ranks:
            return None
        made.append(group)
        return group

    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    group = _of_made(hosts, len(everyone), make, rank, store, ordered)
    for part in made:  # torch.distributed keeps groups until they are destroyed
        finalize(group, _destroy, part).atexit = False
    return group


def new_group_like(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Another group of the same ranks and backend. Called by its members alone, who agree on its name over `group`."""
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend_config(group)
    if group is dist.group.WORLD:
        return dist.new_group(ranks, timeout, backend)
    return _new_group_of_members(_agreed_name(group), ranks, timeout, backend)


def _agreed_name(group) -> str:
    """One that no other group has, the same on all ranks of this one. Collective."""
    box = [f"unisono/{secrets.token_hex(8)}"]
    dist.broadcast_object_list(box, src=dist.get_process_group_ranks(group or dist.group.WORLD)[0], group=group)
    return box[0]


def _new_group_of_members(name: str, ranks: list[int], timeout: timedelta, backend: str) -> dist.ProcessGroup:
    """`dist.new_group` that only `ranks` call. torch's own way, `use_local_synchronization`, names a group by how many a rank has already:
    members of whom one has more never meet."""
    c10d = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(len(ranks), ranks.index(dist.get_rank()), ranks, dist.Backend(backend),
                                              c10d._get_default_store(), group_name=name, timeout=timeout,
                                              device_id=dist.group.WORLD.bound_device_id)
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _destroy(group) -> None:
    with suppress(ValueError):  # destroyed with all groups
        dist.destroy_process_group(group)


def _of_made(hosts: Hosts | None, size: int, make, rank: int, store: dist.Store, ordered: bool) -> _C.ProcessGroup:
    if hosts is None:
        return _C.make_ordered_group(make("all", range(size)))
    if len(hosts) == 1 and not ordered:
        return _C.from_torch(make("all", range(size), "unisono"))
    return over_hosts(hosts, rank, make, store, ordered=ordered)
