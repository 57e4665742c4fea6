"""A default group of torch.distributed for the time of a `with`, in the worker processes of `on_ranks`."""

import contextlib
import os
from datetime import timedelta

import torch.distributed as dist
import unisono  # noqa: F401  registers the backend


@contextlib.contextmanager
def torch_group(backend, timeout=30):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = os.environ["UNISONO_STORE"].removeprefix("file:") + f".{backend.replace(':', '_')}"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size,
                            timeout=timedelta(seconds=timeout))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
