"""The tensors in what a forward returned, whatever its type."""

import torch
from torch.utils._pytree import tree_leaves


def tensors_in(output, _depth=3):
    """Tensors in tensors, lists, tuples, dictionaries, dataclasses and objects' attributes, a few levels deep."""
    tensors = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif _depth > 0 and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
            tensors += tensors_in(list(vars(leaf).values()), _depth - 1)
    return tensors
