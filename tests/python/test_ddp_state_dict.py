"""State dicts: no prefix of ours, and exchanged with torch's wrapper either way."""

import io

import torch
from ranks import outcome_of
from small_models import linear
from torch import nn
from torch_group import torch_group
from unisono import DistributedDataParallel


def state_dicts(group):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = DistributedDataParallel(model, process_group=group)
    plain = {key: value + 1 for key, value in ddp.state_dict().items()}
    keys = list(ddp.state_dict())
    prefixed = {f"module.{key}": value + 1 for key, value in plain.items()}
    ddp.load_state_dict(plain)
    first = torch.equal(model[0].weight, plain["0.weight"])
    ddp.load_state_dict(prefixed)
    second = torch.equal(model[0].weight, prefixed["module.0.weight"])
    outer = nn.ModuleDict({"net": ddp})
    saved = {key: value + 1 for key, value in outer.state_dict().items()}
    outer.load_state_dict(saved)
    third = torch.equal(model[0].weight, saved["net.0.weight"])
    wrong = outcome_of(ddp.load_state_dict, {"0.weight": plain["0.weight"]})
    return keys, first, second, third, wrong.message


def test_state_dict_has_no_prefix_and_loads_either(on_ranks):
    """G1."""
    keys, first, second, third, wrong = on_ranks(1, state_dicts)[0]
    assert keys == list(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict())
    assert (first, second, third) == (True, True, True)
    assert "0.bias" in wrong


def trained(wrapper, seed):
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(wrapper.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        wrapper(torch.randn(5, 2, generator=draw)).square().sum().backward()
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def exchanged_with_stock():
    def model():
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    def same(a, b):
        return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)

    with torch_group("gloo") as world:
        stock, ours = nn.parallel.DistributedDataParallel(model()), DistributedDataParallel(model(), process_group=world)
        trained(stock, world.rank())
        theirs = through_a_file(stock.state_dict())
        results = [same(ours.state_dict(), stock.module.state_dict()), str(ours.load_state_dict(theirs)),
                   same(ours.state_dict(), stock.module.state_dict())]
        trained(ours, 7 + world.rank())
        saved = through_a_file(ours.state_dict())
        results.append(same(saved, stock.module.state_dict()))
        stock.load_state_dict({f"module.{key}": value for key, value in saved.items()})
        bare = model()
        bare.load_state_dict(saved)
        results += [same(saved, stock.module.state_dict()), same(saved, bare.state_dict()), sorted(theirs)]
        del stock  # while the group lives, see test_c10d_group.py
        return results


def test_state_dicts_are_exchanged_with_stock(on_ranks):
    """G1."""
    keys = sorted(f"module.{key}" for key in nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).state_dict())
    expected = [False, "<All keys matched successfully>", True, False, True, True, keys]
    assert on_ranks(2, exchanged_with_stock, group=False) == [expected] * 2


def inner_child_named_module(group):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = linear()

        def forward(self, x):
            return self.module(x)

    ddp = DistributedDataParallel(Net(), process_group=group)
    saved = ddp.state_dict()
    ddp.load_state_dict(saved)
    ddp.load_state_dict({f"module.{key}": value for key, value in saved.items()})
    return list(saved)


def test_a_child_that_is_named_module(on_ranks):
    assert on_ranks(1, inner_child_named_module) == [["module.weight"]]
