"""What `torch.distributed.init_process_group("unisono")` makes: shared memory on one host, two levels over Gloo on several."""

from __future__ import annotations

from datetime import timedelta

from unisono import _C
from unisono.group import countdown
from unisono.several_hosts import gloo, meet


def create(store, rank: int, size: int, timeout: timedelta):
    """A torch backend of the ranks that meet in `store`. Collective. Which ranks share a host they find out by themselves."""
    left = countdown(timeout)
    if size > 1:  # a round of its own, for torch uses its keys again after destroy_process_group()
        store, _, _ = _C.meet_over_hosts("gloo", rank, size, timeout, _C.make_store(store), "unisono")
    group = meet(store, rank, size, timeout, left())
    if group.name in ("serial", "shm"):
        return _C.make_torch_backend(group)
    return _C.make_torch_backend(group, gloo(store, "messages", rank, range(size), timeout, timeout))  # messages keep that of the start
