"""Which ranks share a host, and groups of two levels: shared memory inside a host, torch.distributed between hosts."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from unisono import _C
from unisono.errors import InvalidArgumentError
from unisono.group import _seconds


def place_of_process() -> str:
    """Where this process's memory can be opened at most: the boot, the pid namespace, and the part of the host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.environ.get('UNISONO_HOST_PART', '')}"


class Card:
    """Memory with a secret in it: who can read it through /proc is on the same host, whatever names and variables say."""

    def __init__(self):
        self._secret = secrets.token_hex(16)
        self._fd = os.memfd_create("unisono-host")
        os.write(self._fd, self._secret.encode())

    def shown(self) -> dict:
        return {"pid": os.getpid(), "fd": self._fd, "secret": self._secret, "place": place_of_process()}

    def neighbours(self, cards: list[dict]) -> list[int]:
        """The ranks, by their cards, whose memory this one can open."""
        return [rank for rank, card in enumerate(cards) if self._shares(card)]

    def _shares(self, card: dict) -> bool:
        if card["place"] != place_of_process():
            return False
        try:
            with open(f"/proc/{card['pid']}/fd/{card['fd']}") as memory:
                return memory.read() == card["secret"]
        except OSError:
            return False

    def close(self) -> None:
        os.close(self._fd)


def group_by_host(neighbours: list[list[int]]) -> list[tuple[int, ...]]:
    """The ranks of each host, from what each rank can open."""
    for ranks in neighbours:
        for other in ranks:
            if neighbours[other] != ranks:
                raise InvalidArgumentError(f"rank {ranks[0]} shares memory with ranks {ranks}, rank {other} with {neighbours[other]}: "
                                           f"some processes may not open others' memory (another user, or a container of its own); "
                                           f"give them UNISONO_HOST_PART of their own")
    return sorted({tuple(ranks) for ranks in neighbours})


def hosts_of(process_group=None) -> list[tuple[int, ...]]:
    """The ranks of each host of a torch.distributed group, hosts in the order of their first rank. Ranks share a host when each can open
    the other's memory. The variable UNISONO_HOST_PART splits a host further (one part per NUMA domain, or in tests). Collective."""
    size = dist.get_world_size(process_group)
    card, cards, neighbours = Card(), [None] * size, [None] * size
    dist.all_gather_object(cards, card.shown(), group=process_group)
    dist.all_gather_object(neighbours, card.neighbours(cards), group=process_group)
    card.close()
    return group_by_host(neighbours)


def hierarchical(process_group=None, timeout: float | timedelta = 1800.0) -> _C.ProcessGroup:
    """A group over all ranks of `process_group` (torch.distributed's default one) whose all-reduces go through shared memory inside a
    host and over torch.distributed between hosts, each rank carrying a slice. With one host it is shared memory alone, with one rank
    per host torch.distributed alone. Collective; every rank of the default group must take part, for it makes groups."""
    timeout = _seconds(timeout)
    hosts = hosts_of(process_group)
    rank = dist.get_rank(process_group)
    backend = dist.get_backend_config(process_group)
    everyone = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    if len(hosts) == 1:
        return _C.from_torch(dist.new_group(everyone, timeout, "unisono"))
    flat = dist.new_group(everyone, timeout, backend)
    own = next(ranks for ranks in hosts if rank in ranks)
    if max(map(len, hosts)) == 1:
        return _C.from_torch(flat)
    carriers = min(map(len, hosts))
    across = None
    for i in range(carriers):
        members = [everyone[ranks[i]] for ranks in hosts]
        group = dist.new_group(members, timeout, backend)
        if everyone[rank] in members:
            across = group
    box = [secrets.token_hex(8)]
    dist.broadcast_object_list(box, src=everyone[0], group=process_group)
    store = dist.PrefixStore(f"unisono/{box[0]}/host{own[0]}", dist.distributed_c10d._get_default_store())
    return _C.make_hierarchical_group(flat, across, len(hosts), own.index(rank), len(own), carriers, store)
