"""Models small enough that their gradients are known by hand.

The fixture: rank r of 2, Linear(4 -> 1, no bias), x = full((1, 4), r + 1), loss = sum. The local gradient is r + 1, the
mean is 1.5; 1.0 and 2.0 mean "not synchronised".
"""

import torch
from torch import nn


def linear(features=4, weight=1.0):
    layer = nn.Linear(features, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def x_of(group, scale=1.0, features=4):
    return torch.full((1, features), float((group.rank() + 1) * scale))


class TwoLayers(nn.Module):
    def __init__(self, use_a):
        super().__init__()
        self.a, self.b = linear(), linear()
        self.use_a = use_a

    def forward(self, x):
        return self.b(x) + (self.a(x) if self.use_a else 0)


class WithBuffer(nn.Module):
    def __init__(self, value, size=1):
        super().__init__()
        self.layer = linear()
        self.register_buffer("q", torch.full((size,), float(value)))

    def forward(self, x):
        return self.layer(x)
