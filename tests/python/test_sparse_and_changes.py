"""Sparse gradients, and modules that change after they were wrapped, from Python."""

import pytest
import torch
from ranks import outcome_of
from torch import nn
from unisono import DistributedDataParallel


def rows(group):
    embedding = nn.Embedding(6, 1, sparse=True)
    nn.init.ones_(embedding.weight)
    ddp = DistributedDataParallel(embedding, process_group=group)
    out = []
    for mine in ([[1, 2], [2, 5, 5]], [[0], []]):
        ddp.zero_grad()
        ids = torch.tensor(mine[group.rank()], dtype=torch.long)
        ddp(ids).sum().backward()
        grad = embedding.weight.grad
        out.append((grad.is_sparse, grad.to_dense().flatten().tolist()))
    return out


def test_rows_of_all_ranks(on_ranks):
    expected = [(True, [0, 0.5, 1, 0, 0, 1]), (True, [0.5, 0, 0, 0, 0, 0])]
    assert on_ranks(2, rows) == [expected] * 2


def bag_with_sparse_adam(group):
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    ddp = DistributedDataParallel(nn.Sequential(bag, nn.Linear(4, 2)), process_group=group)
    optimizers = [torch.optim.SparseAdam([bag.weight], lr=0.1), torch.optim.SGD(ddp.module[1].parameters(), 0.1)]
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([[step, 2 * group.rank()]])).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return ddp.replicas_identical()


def test_an_embedding_bag_trains_with_sparse_adam(on_ranks):
    assert on_ranks(2, bag_with_sparse_adam) == [True, True]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)
        for p in self.parameters():
            nn.init.ones_(p)

    def forward(self, x):
        y = self.b(self.a(x))
        return y + self.extra(x) if hasattr(self, "extra") else y


def first(parameter):
    return None if parameter.grad is None else parameter.grad.flatten()[0].item()


def freeze_and_unfreeze(group, views):
    net = Net()
    net.a.weight.requires_grad_(False)
    ddp = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=views)
    x = torch.full((1, 4), group.rank() + 1.0)
    out = []
    for trained in (False, True, False):
        net.a.weight.requires_grad_(trained)
        ddp.zero_grad()
        ddp(x).sum().backward()
        out.append((first(net.a.weight), first(net.b.weight)))
    return out


@pytest.mark.parametrize("views", [True, False])
def test_freeze_and_unfreeze(on_ranks, views):
    results = on_ranks(2, freeze_and_unfreeze, views)
    assert [[b for _, b in result] for result in results] == [[6.0] * 3] * 2
    assert [result[1][0] for result in results] == [1.5] * 2


def added_replaced_converted(group):
    net = Net()
    ddp = DistributedDataParallel(net, process_group=group)
    x = torch.full((1, 4), group.rank() + 1.0)
    ddp(x).sum().backward()
    out = []

    def step(x):
        ddp.zero_grad()
        ddp(x).sum().backward()
        out.append(ddp.replicas_identical())

    torch.manual_seed(group.rank())
    net.extra = nn.Linear(4, 1, bias=False)
    step(x)
    out.append(first(net.extra.weight))
    del net.extra
    net.b.weight = nn.Parameter(torch.randn(1, 4))
    step(x)
    out.append(first(net.b.weight))
    net.double()
    step(x.double())
    out.append((first(net.b.weight), str(net.b.weight.grad.dtype)))
    nn.utils.parametrizations.weight_norm(net.a)
    step(x.double())
    out.append(sorted(name for name, p in net.named_parameters() if p.grad is not None))
    return out


def test_added_replaced_converted(on_ranks):
    expected = [True, 1.5, True, 6.0, True, (6.0, "torch.float64"), True,
                ["a.parametrizations.weight.original0", "a.parametrizations.weight.original1", "b.weight"]]
    assert on_ranks(2, added_replaced_converted) == [expected] * 2


def sparse_ways(group):
    """A padding row, a table used on one rank only, on none, and rows accumulated under no_sync."""
    table = nn.Embedding(5, 2, sparse=True, padding_idx=0)
    dense = nn.Linear(2, 1, bias=False)
    nn.init.ones_(table.weight)
    nn.init.ones_(dense.weight)
    net = nn.ModuleList([table, dense])
    ddp = DistributedDataParallel(net, process_group=group)
    r = group.rank()
    out = []

    def backward(rows):
        x = table(torch.tensor(rows)) if rows else torch.ones(1, 2)
        dense(x).sum().backward()

    for kind in ("padding", "one", "none", "accumulated"):
        ddp.zero_grad()
        if kind == "accumulated":
            with ddp.no_sync():
                backward([1 + r])
        backward({"padding": [0, 1 + r], "one": [1] if r == 0 else [], "none": [], "accumulated": [4]}[kind])
        grad = table.weight.grad
        out.append(None if grad is None else grad.to_dense()[:, 0].tolist())
    return out


def test_sparse_rows_that_are_padding_unused_or_accumulated(on_ranks):
    expected = [[0, 0.5, 0.5, 0, 0], [0, 0.5, 0, 0, 0], None, [0, 0.5, 0.5, 0, 1.0]]
    assert on_ranks(2, sparse_ways) == [expected] * 2


def changed_on_one_rank(group, odd, how):
    net = Net()
    if how == "unfrozen":
        net.a.weight.requires_grad_(False)
    ddp = DistributedDataParallel(net, process_group=group)
    if group.rank() == odd:
        if how == "unfrozen":
            net.a.weight.requires_grad_(True)
        else:
            net.b.weight = nn.Parameter(torch.ones(1, 4, dtype=torch.float64))
    return outcome_of(lambda: ddp(torch.ones(1, 4, dtype=torch.float32)).sum().backward())


@pytest.mark.parametrize("how", ["unfrozen", "replaced"])
@pytest.mark.parametrize("odd", [0, 1])
def test_changed_on_one_rank_is_an_error_on_both(on_ranks, odd, how):
    """The other rank compares no modules; both hear which two calls met, and which parameter's change made one of them."""
    results = on_ranks(2, changed_on_one_rank, odd, how)
    changed, other = results[odd], results[1 - odd]
    assert changed.type == other.type == "MismatchError", results
    name = "a.weight" if how == "unfrozen" else "b.weight"
    assert f"rank {odd} calls all_gather(i64, 1 element, change of '{name}')" in changed.message
    assert f"rank {1 - odd} calls all_reduce(" in changed.message and "gradients of step 0, bucket 0" in changed.message
    assert other.message == changed.message + (" Bucket 0 holds 'b.weight'." if how == "unfrozen" else
                                               " Bucket 0 holds 'b.weight' to 'a.weight' (2 parameters).")


def test_lazy_modules_are_refused_by_name():
    with pytest.raises(Exception, match="'0.weight' of a lazy module"):
        DistributedDataParallel(nn.Sequential(nn.LazyLinear(3)))


def test_meta_modules_are_refused_by_name():
    with pytest.raises(Exception, match="'weight' is on the meta device"):
        DistributedDataParallel(nn.Linear(2, 2, device="meta"))


def test_wrapping_twice_is_refused_by_name():
    net = Net()
    first_wrapper = DistributedDataParallel(net)
    with pytest.raises(Exception, match="'a.weight' belongs to another"):
        DistributedDataParallel(net)
    with pytest.raises(Exception, match="'module.a.weight' belongs to another"):
        DistributedDataParallel(first_wrapper)
    del first_wrapper
    DistributedDataParallel(net)
