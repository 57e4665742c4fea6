"""unisono.DistributedDataParallel against hand-made numbers; the case numbers are those of the project's bug list.

The fixture: rank r of 2, Linear(4 -> 1, no bias), x = full((1, 4), r + 1), loss = sum. The local gradient is r + 1, the
mean is 1.5; 1.0 and 2.0 mean "not synchronised".
"""

import dataclasses
import io

import pytest
import torch
import unisono
from ranks import outcome_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_group import torch_group
from unisono import DistributedDataParallel


def linear(features=4, weight=1.0):
    layer = nn.Linear(features, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def x_of(group, scale=1.0, features=4):
    return torch.full((1, features), float((group.rank() + 1) * scale))


def same_everywhere(results):
    return all(result == results[0] for result in results)


# ------------------------------------------------------------------------------------------------------- the plain case

def plain_steps(group, options):
    ddp = DistributedDataParallel(linear(), process_group=group, **options)
    out = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(group)).sum().backward()
        out.append(ddp.module.weight.grad.tolist())
    return out, ddp.replicas_identical(), ddp.digest()


@pytest.mark.parametrize("options", [
    {}, {"gradient_as_bucket_view": False}, {"overlap": False}, {"naive": True}, {"static_graph": True},
    {"find_unused_parameters": True}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 0.001},
], ids=str)
def test_mean_of_two_ranks(on_ranks, options):
    results = on_ranks(2, plain_steps, options)
    assert results[0][:2] == ([[[1.5] * 4]] * 3, True)
    assert same_everywhere(results)


def starts_as_rank_0(group):
    torch.manual_seed(group.rank())
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    before = model[0].weight.tolist()
    ddp = DistributedDataParallel(model, process_group=group)
    return before, model[0].weight.tolist(), ddp.digest()


def test_all_start_as_rank_0(on_ranks):
    (before_0, after_0, digest_0), (before_1, after_1, digest_1) = on_ranks(2, starts_as_rank_0)
    assert before_0 != before_1
    assert before_0 == after_0 == after_1
    assert digest_0 == digest_1


def of_default_group(group):
    return DistributedDataParallel(linear()).process_group is group


def test_the_newest_group_is_the_default(on_ranks):
    assert on_ranks(2, of_default_group) == [True, True]


def over_torch_groups(path, rank, size, backend):
    import torch.distributed as dist

    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        grads = []
        for group in (None, dist.group.WORLD):
            ddp = DistributedDataParallel(linear(), process_group=group)
            ddp(torch.full((1, 4), rank + 1.0)).sum().backward()
            grads.append(ddp.module.weight.grad.tolist())
        stock = nn.parallel.DistributedDataParallel(linear())
        stock(torch.full((1, 4), rank + 1.0)).sum().backward()
        return [*grads, stock.module.weight.grad.tolist()]
    finally:
        dist.destroy_process_group()


def with_rank(function, *args):
    import os

    return function(*args[:1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *args[1:])


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_over_torch_distributed(on_ranks, tmp_path, backend):
    results = on_ranks(2, with_rank, over_torch_groups, str(tmp_path / "store"), backend, group=False)
    assert results == [[[[1.5] * 4]] * 3] * 2


# ------------------------------------------------------------------------------------------- against torch's own numbers

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


def gradients(make_wrapper, name, rank):
    torch.manual_seed(1)
    model = MODELS[name]()
    dtype = {"double": torch.float64, "bf16": torch.bfloat16}.get(name, torch.float32)
    draw = torch.Generator().manual_seed(5 + rank)
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


def compare_with_torch(path, rank, size, name):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        torch.set_num_threads(1)
        theirs = gradients(lambda m: nn.parallel.DistributedDataParallel(m, find_unused_parameters=True), name, rank)
        ours = gradients(lambda m: DistributedDataParallel(m, process_group=unisono.init()), name, rank)
        return [[(a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(x, y, strict=True)]
                for x, y in zip(theirs, ours, strict=True)]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_torch_s_to_the_bit(on_ranks, tmp_path, name):
    """Sums of two ranks: there is one rounding, wherever it is made."""
    for result in on_ranks(2, with_rank, compare_with_torch, str(tmp_path / "store"), name, group=False):
        assert all(map(all, result)), result


# -------------------------------------------------------------------------------------------------------------- graphs

class TwoLayers(nn.Module):
    def __init__(self, use_a):
        super().__init__()
        self.a, self.b = linear(), linear()
        self.use_a = use_a

    def forward(self, x):
        return self.b(x) + (self.a(x) if self.use_a else 0)


def unused(group, options):
    ddp = DistributedDataParallel(TwoLayers(use_a=False), process_group=group, **options)
    out = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(x_of(group)).sum().backward()
        out.append((ddp.module.a.weight.grad, ddp.module.b.weight.grad.tolist()))
    return out


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"naive": True}, {"overlap": False}], ids=str)
def test_an_unused_parameter(on_ranks, options):
    """B1."""
    assert on_ranks(2, unused, options) == [[(None, [[1.5] * 4])] * 2] * 2


def test_strict_mode_names_an_unused_parameter(on_ranks):
    """B1."""
    for result in on_ranks(2, outcome_of_unused, {"strict": True}):
        assert "a.weight" in result.message
        assert "Error" in result.bases


def outcome_of_unused(group, options):
    return outcome_of(unused, group, options)


def used_on_rank_0_only(group):
    ddp = DistributedDataParallel(TwoLayers(use_a=group.rank() == 0), process_group=group)
    out = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(group)).sum().backward()
        out.append((ddp.module.a.weight.grad.tolist(), ddp.module.b.weight.grad.tolist()))
    return out


def test_a_parameter_used_on_one_rank_only(on_ranks):
    assert on_ranks(2, used_on_rank_0_only) == [[([[0.5] * 4], [[1.5] * 4])] * 3] * 2


@dataclasses.dataclass
class Result:
    value: torch.Tensor


class PlainResult:
    def __init__(self, value):
        self.value = value


class Wrapping(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = linear(), kind

    def forward(self, x):
        return self.kind(self.layer(x))


def odd_outputs(group, kind, options):
    ddp = DistributedDataParallel(Wrapping(kind), process_group=group, **options)
    out = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(x_of(group)).value.sum().backward()
        out.append(ddp.module.layer.weight.grad.tolist())
    return out


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("kind", [Result, PlainResult])
def test_any_type_of_output(on_ranks, kind, options):
    """B2."""
    assert on_ranks(2, odd_outputs, kind, options) == [[[[1.5] * 4]] * 4] * 2


def nested_checkpoints(group):
    inner = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        inner.weight.copy_(2 * torch.eye(4))
    outer = nn.Linear(4, 1, bias=False)
    nn.init.ones_(outer.weight)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = inner, outer

        def forward(self, x):
            def once(y):
                return checkpoint(self.inner, y, use_reentrant=True)

            return self.outer(checkpoint(lambda y: self.inner(once(y)), x, use_reentrant=True))

    ddp = DistributedDataParallel(Net(), process_group=group)
    out = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(x_of(group).requires_grad_()).sum().backward()
        out.append(inner.weight.grad[0, 0].item())
    return out


def test_nested_reentrant_checkpoints(on_ranks):
    """B5."""
    assert on_ranks(2, nested_checkpoints) == [[6.0, 6.0]] * 2


def two_forwards_then_two_backwards(group):
    ddp = DistributedDataParallel(linear(), process_group=group)
    a, b = ddp(x_of(group)), ddp(x_of(group, 2))
    a.sum().backward()
    b.sum().backward()
    return ddp.module.weight.grad.tolist()


def test_two_forwards_then_two_backwards(on_ranks):
    """B7."""
    assert on_ranks(2, two_forwards_then_two_backwards) == [[[4.5] * 4]] * 2


def past_the_wrapper(group):
    ddp = DistributedDataParallel(linear(), process_group=group)
    ddp.module(x_of(group)).sum().backward()
    return ddp.module.weight.grad.tolist()


def test_the_inner_module_called_directly(on_ranks):
    assert on_ranks(2, past_the_wrapper) == [[[1.5] * 4]] * 2


# -------------------------------------------------------------------------------------------------------- accumulation

class UsedInReverse(nn.Module):
    """Registered last layer first: gradients come in another order than the first plan expects."""

    def __init__(self):
        super().__init__()
        self.c, self.b, self.a = (nn.Linear(4, n, bias=False) for n in (1, 4, 4))
        for layer in self.children():
            nn.init.constant_(layer.weight, 0.5)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def rebuilt_while_accumulating(group, cap, view):
    model = UsedInReverse()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=view)
    out = []
    for _ in range(3):
        ddp(x_of(group)).sum().backward()
        out.append(([layer.weight.grad.unique().tolist() for layer in (model.a, model.b, model.c)], ddp.stats.rebuilds))
    return out


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("cap", [0, 20 / 2**20, 25])
def test_rebuild_keeps_what_has_accumulated(on_ranks, cap, view):
    """C4."""
    expected = [([[1.5 * n], [1.5 * n], [6.0 * n]], min(n - 1, 1)) for n in (1, 2, 3)]
    assert on_ranks(2, rebuilt_while_accumulating, cap, view) == [expected] * 2


def accumulation_rounds(group, options):
    ddp = DistributedDataParallel(linear(), process_group=group, **options)
    out = []
    for _ in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x_of(group)).sum().backward()
            ddp(x_of(group, 2)).sum().backward()
        local = ddp.module.weight.grad[0, 0].item()
        step = ddp.stats.step
        ddp(x_of(group, 3)).sum().backward()
        out.append((local, ddp.module.weight.grad[0, 0].item(), ddp.stats.step - step, ddp.stats.messages))
    return out


@pytest.mark.parametrize("options", [
    {}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False},
    {"static_graph": True, "find_unused_parameters": True, "gradient_as_bucket_view": False},
], ids=str)
def test_no_sync_rounds(on_ranks, options):
    """C1, C5: one bucket, so one message a round."""
    for rank, rounds in enumerate(on_ranks(2, accumulation_rounds, options)):
        assert [r[:3] for r in rounds] == [(3.0 * (rank + 1), 9.0, 1)] * 3
        assert [r[3] for r in rounds] == [1] * 3


def synchronised_by_hand(group):
    ddp = DistributedDataParallel(linear(), process_group=group)
    with ddp.no_sync():
        for _ in range(3):
            ddp(x_of(group)).sum().backward()
    local = ddp.module.weight.grad[0, 0].item()
    ddp.sync_grads()
    return local, ddp.module.weight.grad[0, 0].item()


def test_sync_grads_without_a_backward(on_ranks):
    """C3, its second half."""
    assert on_ranks(2, synchronised_by_hand) == [(3.0, 4.5), (6.0, 4.5)]


def no_sync_restores(group):
    ddp = DistributedDataParallel(linear(), process_group=group)
    with ddp.no_sync(), ddp.no_sync(enabled=False):
        inside = ddp._core.sync()
    try:
        with ddp.no_sync():
            raise KeyError
    except KeyError:
        pass
    return inside, ddp._core.sync()


def test_no_sync_nests_and_survives_exceptions(on_ranks):
    assert on_ranks(1, no_sync_restores) == [(False, True)]


def tampering(group, what):
    ddp = DistributedDataParallel(nn.Sequential(linear(), nn.Linear(1, 1, bias=False)), process_group=group)
    model = ddp.module
    nn.init.ones_(model[1].weight)
    held = None
    out = []
    for _ in range(3):
        ddp(x_of(group)).sum().backward()
        grad = model[0].weight.grad
        out.append(grad[0, 0].item())
        if what == "clear one":
            model[0].weight.grad = None
        elif what == "clone one":
            model[0].weight.grad = grad.clone()
        elif what == "scale one":
            grad.mul_(0.5)
        elif what == "hold one":
            held = grad
            ddp.zero_grad(set_to_none=True)
    return out, held is None or held.shape == grad.shape


@pytest.mark.parametrize("what, expected", [
    ("clear one", [1.5, 1.5, 1.5]),
    ("clone one", [1.5, 3.0, 4.5]),
    ("scale one", [1.5, 2.25, 2.625]),
    ("hold one", [1.5, 1.5, 1.5]),
])
def test_gradients_handled_between_steps(on_ranks, what, expected):
    """C6."""
    assert on_ranks(2, tampering, what) == [(expected, True)] * 2


def weighted(group, plan):
    ddp = DistributedDataParallel(linear(1, 0.0), process_group=group)
    batches = [torch.full((n, 1), value) for n, value in plan[group.rank()]]
    for i, batch in enumerate(batches):
        loss = ddp(batch).mean() if len(batch) else ddp(torch.zeros(1, 1)).sum() * 0
        with ddp.no_sync(enabled=i + 1 < len(batches)):
            ddp.weight(loss, len(batch)).backward()
    return ddp.module.weight.grad.item()


@pytest.mark.parametrize("plan, expected", [
    (([(5, 1.0)], [(1, 10.0)]), 2.5),
    (([(2, 1.0), (3, 1.0)], [(1, 10.0), (0, 0.0)]), 2.5),
    (([(5, 2.0)], [(0, 0.0)]), 2.0),
    (([(0, 0.0)], [(0, 0.0)]), 0.0),
], ids=["one batch each", "micro-batches", "a rank without samples", "no samples at all"])
def test_true_average(on_ranks, plan, expected):
    """C7."""
    assert on_ranks(2, weighted, plan) == [expected] * 2


# ------------------------------------------------------------------------------------------------- buffers and dtypes

class WithBuffer(nn.Module):
    def __init__(self, value, size=1):
        super().__init__()
        self.layer = linear()
        self.register_buffer("q", torch.full((size,), float(value)))

    def forward(self, x):
        return self.layer(x)


def buffer_at_start(group, options):
    module = WithBuffer(group.rank())
    ddp = DistributedDataParallel(module, process_group=group, **options)
    at_start = module.q.tolist()
    ddp(x_of(group)).sum().backward()
    module.q.fill_(10.0 + group.rank())
    ddp(x_of(group)).sum().backward()
    first = module.q.tolist()
    module.q.fill_(20.0 + group.rank())
    with ddp.no_sync():
        ddp(x_of(group))
    inside = module.q.tolist()
    ddp(x_of(group))
    return at_start, first, inside, module.q.tolist()


@pytest.mark.parametrize("options", [{"broadcast_buffers": False}, {"forward_sync_buffers": False}], ids=str)
def test_buffers_start_as_rank_0_without_the_broadcast_per_step(on_ranks, options):
    """E3."""
    results = on_ranks(2, buffer_at_start, options)
    assert [r[0] for r in results] == [[0.0]] * 2
    assert [r[1] for r in results] == [[10.0], [11.0]]


def test_buffers_follow_rank_0(on_ranks):
    for rank, (at_start, first, inside, after) in enumerate(on_ranks(2, buffer_at_start, {})):
        assert (at_start, first, inside, after) == ([0.0], [10.0], [20.0 + rank], [20.0])


def half_precision(group, dtype, small):
    layer = nn.Linear(2, 1, bias=False).to(dtype)
    ddp = DistributedDataParallel(layer, process_group=group)
    value = 1.0 if group.rank() == 0 else small
    ddp(torch.full((1, 2), value, dtype=dtype)).sum().backward()
    return layer.weight.grad.double().tolist()


@pytest.mark.parametrize("dtype, small", [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)], ids=str)
def test_half_precision_is_accumulated_in_f32(on_ranks, dtype, small):
    """E8: 1 and three times a quarter of its last place, a quarter of it all rounded once. In 16 bits it stays 0.25."""
    assert torch.ones((), dtype=dtype) + small == torch.ones((), dtype=dtype) + 2 * small == 1
    expected = torch.tensor((1 + 3 * small) / 4, dtype=torch.float64).to(dtype).item()
    assert expected != 0.25
    assert on_ranks(4, half_precision, dtype, small) == [[[expected] * 2]] * 4


# --------------------------------------------------------------------------------------------------------- the wrapper

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


def attributes(group):
    model = WithBuffer(3)
    model.note = "mine"
    ddp = DistributedDataParallel(model, process_group=group)
    missing = outcome_of(getattr, ddp, "nothing_like_it")
    ddp.eval()
    return ddp.note, ddp.q.item(), missing.type, missing.message, model.training


def test_attributes_fall_through_to_the_module(on_ranks):
    assert on_ranks(1, attributes) == [
        ("mine", 3.0, "AttributeError", "'WithBuffer' object has no attribute 'nothing_like_it'", False)]


def ignored(group):
    model = TwoLayers(use_a=True)
    ddp = DistributedDataParallel(model, process_group=group, parameters_and_buffers_to_ignore=["a.weight"])
    ddp(x_of(group)).sum().backward()
    return model.a.weight.grad[0, 0].item(), model.b.weight.grad[0, 0].item()


def test_ignored_parameters_stay_local(on_ranks):
    assert on_ranks(2, ignored) == [(1.0, 1.5), (2.0, 1.5)]


def bits_for_cap(group, cap):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    draw = torch.Generator().manual_seed(group.rank())
    for step in range(5):
        scale = 10.0 ** (3 * group.rank() - step)  # so that the order of summation matters
        optimizer.zero_grad()
        (ddp(torch.randn(16, 64, generator=draw)) * scale).sum().backward()
        optimizer.step()
    return ddp.digest()


def test_bucket_size_does_not_change_a_bit(on_ranks):
    """K2."""
    digests = {digest for cap in (1 / 1024, 1, 25) for _ in range(2) for digest in on_ranks(3, bits_for_cap, cap)}
    assert len(digests) == 1


def traced(group, path):
    ddp = DistributedDataParallel(linear(), process_group=group)
    ddp.set_tracing(True)
    ddp(x_of(group)).sum().backward()
    events = ddp.take_trace()
    unisono.write_chrome_trace(path, group.rank(), events)
    return sorted({event.category for event in events}), len(ddp.take_trace()), ddp.bucket_sizes


def test_trace(on_ranks, tmp_path):
    import json

    path = tmp_path / "trace.json"
    categories, left, sizes = on_ranks(1, traced, str(path))[0]
    assert categories == ["all-reduce", "buckets", "hooks", "steps"]
    assert left == 0
    assert sum(sizes) >= 16
    data = json.loads(path.read_text())
    assert (data["traceEvents"] if isinstance(data, dict) else data)


def shares_storage(group, view):
    ddp = DistributedDataParallel(TwoLayers(use_a=True), process_group=group, gradient_as_bucket_view=view)
    ddp(x_of(group)).sum().backward()
    a, b = (layer.weight.grad.untyped_storage().data_ptr() for layer in (ddp.module.a, ddp.module.b))
    return a == b


@pytest.mark.parametrize("view", [True, False])
def test_gradients_are_views_into_one_bucket_unless_told_otherwise(on_ranks, view):
    assert on_ranks(1, shares_storage, view) == [view]


def held(group, views):
    net = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=views)
    kept = []
    for step in range(1, 5):
        net.zero_grad(set_to_none=True)
        ddp(torch.full((1, 4), float(step))).sum().backward()
        kept.append(net.weight.grad)
    return [gradient[0, 0].item() for gradient in kept[2:]]


@pytest.mark.parametrize(("views", "expected"), [(True, [4.0, 4.0]), (False, [3.0, 4.0])])
def test_a_held_gradient(on_ranks, views, expected):
    """A view of a bucket is the next step's gradient, as with torch's gradient_as_bucket_view; without views it stays."""
    assert on_ranks(2, held, views) == [expected] * 2
