"""Gradients of many kinds of models against those of torch's own DistributedDataParallel, to the bit."""

import os

import pytest
import torch
import unisono
from torch import nn
from torch_group import torch_group
from unisono import DistributedDataParallel


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.a(x) if x.sum() > 0 else self.b(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(torch.tanh(self.embedding((x[:, :4].abs() * 5).long() % 11)))


def convolutional():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
                         nn.Flatten(), nn.LazyLinear(2))


def transformer():
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 8),
                         nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 2))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)),
    "wide": lambda: nn.Sequential(nn.Linear(6, 600), nn.GELU(), nn.Linear(600, 600), nn.GELU(), nn.Linear(600, 2)),
    "convolutional": convolutional,
    "transformer": transformer,
    "branches": Branches,
    "tied": Tied,
    "double": lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double(),
    "bf16": lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).bfloat16(),
    "lstm": lambda: nn.LSTM(6, 5),
    "groupnorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 2)),
    "bilinear": lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.LayerNorm(8), nn.Linear(8, 2)),
    "one parameter": lambda: nn.Linear(6, 1, bias=False),
}


def gradients(make_wrapper, name):
    torch.manual_seed(1)
    model = MODELS[name]()
    dtype = {"double": torch.float64, "bf16": torch.bfloat16}.get(name, torch.float32)
    draw = torch.Generator().manual_seed(5 + int(os.environ["RANK"]))
    model(torch.randn(3, 6, dtype=dtype, generator=torch.Generator().manual_seed(0)))  # lazy shapes
    ddp = make_wrapper(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    out = []
    for _ in range(3):
        result = ddp(torch.randn(3, 6, dtype=dtype, generator=draw))
        result = result[0] if isinstance(result, tuple) else result
        optimizer.zero_grad()
        (result.float() ** 2).mean().backward()
        out.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return out


def compare_with_torch(name):
    with torch_group("gloo"):
        torch.set_num_threads(1)
        theirs = gradients(lambda m: nn.parallel.DistributedDataParallel(m, find_unused_parameters=True), name)
        ours = gradients(lambda m: DistributedDataParallel(m, process_group=unisono.init()), name)
        return [[(a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(x, y, strict=True)]
                for x, y in zip(theirs, ours, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_torch_s_to_the_bit(on_ranks, name):
    """Sums of two ranks: there is one rounding, wherever it is made."""
    for result in on_ranks(2, compare_with_torch, name, group=False):
        assert all(map(all, result)), result
