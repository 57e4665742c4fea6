"""What `torch.distributed.init_process_group("unisono")` makes: shared memory on one host, two levels over Gloo on several."""

from __future__ import annotations

from datetime import timedelta

from unisono import _C
from unisono.several_hosts import gloo, meet


def create(store, rank: int, size: int, timeout: timedelta):
    """A torch backend of the ranks that meet in `store`. Collective. Which ranks share a host they find out by themselves."""
    group = meet(store, rank, size, timeout)
    beside = None if group.name in ("serial", "shm") else gloo(store, "messages", rank, size, timeout)
    return _C.make_torch_backend(group, beside)
