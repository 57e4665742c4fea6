"""A process that was forked from a rank's, as a DataLoader's worker is: what it lets go of stays the rank's."""

import gc
import os

import pytest
import torch
import unisono
from ranks import outcome_of
from torch import nn
from torch_group import torch_group
from unisono import DistributedDataParallel
from unisono.group import resolve


def lets_go_in_a_child(group):
    net = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(net, process_group=group)
    x = torch.full((1, 4), group.rank() + 1.0)
    ddp(x).sum().backward()
    child = os.fork()
    if child == 0:
        try:
            net.weight.grad = None
            del ddp, net, group
            unisono.group._default_group = None
            unisono.group._of_torch.clear()
            gc.collect()
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    out = [net.weight.grad.tolist()]
    ddp(x).sum().backward()
    return status, [*out, net.weight.grad.tolist()], ddp.replicas_identical()


def in_shared_memory():
    return lets_go_in_a_child(unisono.init(timeout=30, start_timeout=30))


def over_gloo():
    with torch_group("gloo"):
        return lets_go_in_a_child(resolve(None))


@pytest.mark.parametrize("where", [in_shared_memory, over_gloo])
def test_what_a_child_lets_go_of_stays_the_ranks(on_ranks, where):
    assert on_ranks(2, where, group=False) == [(0, [[[1.5] * 4], [[3.0] * 4]], True)] * 2


def calls_in_a_child(group):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            raised = outcome_of(lambda: group.all_reduce(torch.ones(2)).wait())
            group.abort("a child has no say")
            os.write(writer, raised.message.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    value = torch.ones(2)
    group.all_reduce(value).wait()
    return said, value.tolist()


def over_gloo_in_a_child():
    with torch_group("gloo") as world:
        return calls_in_a_child(resolve(world))


@pytest.mark.parametrize("over", ["shm", "gloo"])
def test_a_call_in_a_child_is_refused(on_ranks, over):
    results = on_ranks(2, calls_in_a_child) if over == "shm" else on_ranks(2, over_gloo_in_a_child, group=False)
    for rank, (said, value) in enumerate(results):
        assert f"forked from rank {rank}'s" in said and "spawn" in said
        assert value == [2.0, 2.0]
