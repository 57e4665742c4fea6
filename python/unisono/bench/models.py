"""The models that `unisono bench step` trains. Widths and batches are part of what is measured: change one, change its name."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Model:
    name: str
    what: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple]  # inputs and targets
    loss: Callable  # (module, inputs, targets)


def mlp(*widths: int) -> nn.Module:
    layers = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class GPT(nn.Module):
    """A decoder as GPT-2's, the output matrix shared with the embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.token(ids) + self.position.weight[:ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ManyParameters(nn.Module):
    """n parameters of 10 elements, one operation each: what a wrapper costs per parameter, not per byte."""

    def __init__(self, n: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(10) / math.sqrt(n) for _ in range(n))

    def forward(self, x):
        h = x
        for weight in self.weights:
            h = torch.addcmul(h, weight, x)
        return h


class PartlyUsed(ManyParameters):
    """Of every ten parameters the last three take no part."""

    def forward(self, x):
        h = x
        for i, weight in enumerate(self.weights):
            if i % 10 < 7:
                h = torch.addcmul(h, weight, x)
        return h


class DroppedGPT(GPT):
    """Each step leaves out a random half of the layers, the same on all ranks (by a seed they share), as in section 6.2 of
    arXiv 2006.15704."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, ids):
        x = self.token(ids) + self.position.weight[:ids.shape[1]]
        kept = torch.randperm(len(self.blocks), generator=self.generator)[:len(self.blocks) // 2].sort().values
        for i in kept.tolist():
            x = self.blocks[i](x)
        return F.linear(self.norm(x), self.token.weight)


def _classes(inputs: int, classes: int, batch: int):
    return lambda: (torch.randn(batch, inputs), torch.randint(0, classes, (batch,)))


def _entropy(module, inputs, targets):
    return F.cross_entropy(module(inputs), targets)


def _token_entropy(module, inputs, targets):
    logits = module(inputs)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def _many(n: int) -> Model:
    return Model(f"params{n}", f"{n:,} parameters of 10 elements, one addcmul each", lambda: ManyParameters(n),
                 lambda: (torch.randn(10), torch.zeros(10)), lambda module, x, y: (module(x) - y).sum())


MODELS = {model.name: model for model in (
    Model("mlp", "MLP 1024-2048-2048-256, batch 64 per rank", lambda: mlp(1024, 2048, 2048, 256),
          _classes(1024, 256, 64), _entropy),
    Model("tiny", "MLP 32-64-64-10, batch 32 per rank", lambda: mlp(32, 64, 64, 10), _classes(32, 10, 32), _entropy),
    Model("gpt", "GPT of 6 layers, width 384, 6 heads, 256 tokens, batch 4 x 128 per rank",
          lambda: GPT(vocabulary=256, context=256, width=384, heads=6, layers=6),
          lambda: (torch.randint(0, 256, (4, 128)), torch.randint(0, 256, (4, 128))), _token_entropy),
    Model("layerdrop", "the same GPT, three of its six layers left out in each step",
          lambda: DroppedGPT(vocabulary=256, context=256, width=384, heads=6, layers=6),
          lambda: (torch.randint(0, 256, (4, 128)), torch.randint(0, 256, (4, 128))), _token_entropy),
    Model("unused30", "1,000 parameters of 10 elements, 300 of them unused", lambda: PartlyUsed(1000),
          lambda: (torch.randn(10), torch.zeros(10)), lambda module, x, y: (module(x) - y).sum()),
    _many(1000),
    _many(10000),
)}


def describe(model: Model) -> str:
    parameters = list(model.make().parameters())
    return f"{model.what}: {sum(p.numel() for p in parameters):,} numbers in {len(parameters):,} parameters"


def gradient_bytes(model: Model) -> int:
    return sum(p.numel() * p.element_size() for p in model.make().parameters())
