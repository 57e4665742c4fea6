"""One rank of ours and of torch's Gloo, told over a socket:  python -m unisono.bench.all_reduce_worker SOCKET LIMIT

It reads "burst IMPL BYTES WARM_UP CALLS" and answers "SECONDS PSS"; it ends when the socket is closed. LIMIT leads to memory
that all ranks map.
"""

import socket
import sys
import time

import torch
import torch.distributed as dist

import unisono
from unisono import _C
from unisono.bench.memory import memory_now


class ThroughTorch:
    """torch.distributed.all_reduce of an ordinary tensor, called from Python, as its users do."""

    def __init__(self, group, size: int):
        self._group = group
        self._tensor = torch.full((size // 4,), float(dist.get_rank() + 1))
        dist.all_reduce(self._tensor, group=group)
        expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
        if not bool((self._tensor == expected).all()):
            raise RuntimeError("a wrong sum")
        self._tensor.zero_()

    def burst(self, warm_up: int, calls: int) -> float:
        tensor, group, all_reduce = self._tensor, self._group, dist.all_reduce
        for _ in range(warm_up):
            all_reduce(tensor, group=group)
        dist.barrier(group)
        begin = time.perf_counter()
        for _ in range(calls):
            all_reduce(tensor, group=group)
        return time.perf_counter() - begin


def main() -> None:
    socket_path, limit_path = sys.argv[1:]
    torch.set_num_threads(1)
    group = unisono.init()
    dist.init_process_group("gloo")
    gloo, ours = dist.group.WORLD, dist.new_group(backend="unisono")
    impls = {
        "unisono-inplace": lambda size: _C.bench.InPlace(group, size),
        "unisono-torch": lambda size: ThroughTorch(ours, size),
        "gloo": lambda size: ThroughTorch(gloo, size),
        "limit": lambda size: _C.bench.Limit(group, limit_path, size),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(socket_path)
        link = connection.makefile("rw")
    print(group.rank(), "torch", torch.__version__, file=link, flush=True)
    for line in link:
        _, impl, *numbers = line.split()
        size, warm_up, calls = map(int, numbers)
        rival = impls[impl](size)
        seconds = rival.burst(warm_up, calls)
        memory = memory_now()["pss"]
        del rival
        dist.barrier(gloo)  # nobody still holds its memory when the next one begins
        print(f"{seconds:.9g} {memory}", file=link, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
