"""unisono.SyncBatchNorm against torch's BatchNorm in one process on the union of the batches."""

import copy

import pytest
import torch
import unisono
from ranks import outcome_of
from torch import nn
from unisono import DistributedDataParallel, SyncBatchNorm


def net(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3),
                         nn.BatchNorm2d(6, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, 3)).to(dtype)


def data(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(8, 2, 7, 7, dtype=dtype), torch.randn(8, 3, dtype=dtype)


def train(model, forward, x, target):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        sgd.zero_grad()
        nn.functional.mse_loss(forward(x), target).backward()
        sgd.step()
    return {name: t.clone() for name, t in model.state_dict().items()}


def trained_together(group, options):
    x, target = (t.chunk(group.size())[group.rank()] for t in data())
    model = SyncBatchNorm.convert_sync_batchnorm(net(), options.pop("process_group", group))
    ddp = DistributedDataParallel(model, process_group=group, **options)
    return train(model, ddp, x, target), ddp.replicas_identical(), ddp.digest()


def expect_one_process(results):
    model = net()
    one = train(model, model, *data())
    for state, identical, digest in results:
        assert identical
        assert digest == results[0][2]
        for name, value in one.items():  # f64; five steps amplify roundings of 1e-16
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}, {"gradient_as_bucket_view": False}], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_a_convolutional_net_trains_as_in_one_process(on_ranks, world, options):
    expect_one_process(on_ranks(world, trained_together, options))


def over_torch(path, backend):
    import os

    import torch.distributed as dist

    dist.init_process_group(backend, init_method=f"file://{path}", rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
    try:
        return trained_together(unisono.group.resolve(None), {"bucket_cap_mb": 0, "process_group": None})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_over_torch_distributed(on_ranks, tmp_path, backend):
    expect_one_process(on_ranks(2, over_torch, str(tmp_path / "store"), backend, group=False))


def companion_by_hand(path):
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(os.environ["RANK"]), world_size=2)
    try:
        unisono.set_companion(None, dist.new_group())
        again = outcome_of(unisono.set_companion, None, dist.new_group())
        layer = SyncBatchNorm(2)
        layer(torch.tensor([[1.0, 2.0]]) * dist.get_rank())
        return again.message, layer.running_mean.tolist()
    finally:
        dist.destroy_process_group()


def test_a_companion_made_by_hand(on_ranks, tmp_path):
    results = on_ranks(2, companion_by_hand, str(tmp_path / "store"), group=False)
    for message, mean in results:
        assert "it has one already" in message
        assert mean == pytest.approx([0.05, 0.1])


# ------------------------------------------------------------------------------------------------- order of collectives

class Lopsided(nn.Module):
    """Rank 0 uses a parameter that rank 1 does not: its buckets are full at other moments."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), SyncBatchNorm(4)
        self.side = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x, use):
        x = self.norm(self.first(x))
        for layer in self.side:
            x = layer(x) if use else x
        return self.head(x)


def lopsided(group, options):
    torch.manual_seed(0)
    model = Lopsided()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0, **options)
    torch.manual_seed(group.rank())
    for _ in range(8):
        ddp.zero_grad()
        ddp(torch.randn(6, 4), group.rank() == 0).square().mean().backward()
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    return ddp.replicas_identical()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_buckets_that_leave_at_other_moments_do_not_meet_the_layers_calls(on_ranks, options):
    assert on_ranks(2, lopsided, options) == [True, True]


# ----------------------------------------------------------------------------------------------------- the layer itself

def union_of(group, batches):
    out = []
    for sizes, shape in batches:
        torch.manual_seed(5)
        whole = torch.randn(sum(sizes), *shape)
        out.append((whole, whole.split(sizes)[group.rank()]))
    return out


def same_as_torch(group, sizes, shape, layer_options):
    one = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape) + 1](shape[0],
                                                                                                       **layer_options)
    ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(one), group)
    (whole, mine), = union_of(group, [(sizes, shape)])
    whole, mine = whole.clone().requires_grad_(), mine.clone().requires_grad_()
    begin = sum(sizes[:group.rank()])
    both = []
    for layer, x in ((one, whole), (ours, mine)):
        y = layer(x)
        y.pow(3).sum().backward()
        both.append((y.detach(), x.grad))
    part = slice(begin, begin + sizes[group.rank()])

    def close(a, b, scale, roundings=4):
        return a.numel() == 0 or (a - b).abs().max().item() <= roundings * torch.finfo(a.dtype).eps * scale

    # Torch's kernels add f32 up in f64 or in f32, depending on the layout, and fuse additions with multiplications; ours
    # always add up in f64. The scales are those of the terms, which may cancel.
    largest = whole.abs().max().item()
    steep = 1 / whole.transpose(0, 1).reshape(shape[0], -1).std(1).min().item()
    dy = 3 * both[0][0].square().max().item()
    outputs = close(both[1][0], both[0][0][part], max(both[0][0].abs().max().item(), largest * steep))
    inputs = close(both[1][1], both[0][1][part], dy * steep, 12)
    pairs = zip(one.buffers(), ours.buffers(), strict=True)
    buffers = all(close(a.float(), b.float(), max(1.0, largest)) for a, b in pairs)
    grads = []
    for mine_p, one_p in zip(ours.parameters(), one.parameters(), strict=True):
        summed = mine_p.grad.clone()
        group.all_reduce(summed).wait()
        grads.append(close(summed, one_p.grad, dy * whole.numel() / shape[0] * largest * steep))
    return outputs, inputs, buffers, all(grads)


@pytest.mark.parametrize("layer_options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None},
                                           {"eps": 0.1, "momentum": 1.0}], ids=str)
@pytest.mark.parametrize("sizes, shape", [((4, 4), (5,)), ((5, 0, 2), (3, 7)), ((1, 3), (3, 4, 5)),
                                          ((2, 1), (2, 3, 2, 3))], ids=str)
def test_equals_torch_on_the_union(on_ranks, sizes, shape, layer_options):
    world = len(sizes)
    assert on_ranks(world, same_as_torch, list(sizes), shape, layer_options) == [(True,) * 4] * world


def half_input(group, dtype):
    dtype = getattr(torch, dtype)
    (whole, mine), = union_of(group, [((6, 6), (3, 5))])
    layer = SyncBatchNorm(3, process_group=group)
    x = mine.to(dtype).requires_grad_()
    y = layer(x)
    y.sum().backward()
    one = nn.BatchNorm1d(3)
    expected = one(whole.to(dtype))
    part = slice(6 * group.rank(), 6 * group.rank() + 6)
    # f32 statistics leave half-precision outputs at most one rounding apart.
    return (str(y.dtype), str(x.grad.dtype), str(layer.weight.grad.dtype),
            torch.allclose(y.float(), expected[part].float(), rtol=torch.finfo(dtype).eps, atol=1e-6),
            torch.allclose(layer.running_var, one.running_var, rtol=1e-6))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_inputs_have_f32_statistics(on_ranks, dtype):
    assert on_ranks(2, half_input, dtype) == [(f"torch.{dtype}", f"torch.{dtype}", "torch.float32", True, True)] * 2


def without_gradients(group):
    layer = SyncBatchNorm(2, momentum=1.0, process_group=group)
    with torch.no_grad():
        layer(torch.full((3, 2), float(group.rank())))
    layer.eval()
    if group.rank() == 0:
        layer(torch.ones(1, 2))
    return layer.running_mean.tolist()


def test_statistics_are_exchanged_without_gradients_and_not_in_evaluation(on_ranks):
    assert on_ranks(2, without_gradients) == [[0.5, 0.5]] * 2


def errors(group):
    layer = SyncBatchNorm(2, process_group=group)
    x = torch.randn(3, 2, requires_grad=True)
    gradient, = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    second = outcome_of(gradient.sum().backward)
    alone = outcome_of(layer, torch.ones(1 - group.rank(), 2))
    return [(o.bases[0], o.message) for o in (second, alone)]


def test_errors(on_ranks):
    for result in on_ranks(2, errors):
        assert [kind for kind, _ in result] == ["InvalidArgumentError"] * 2
        assert "it has no second derivative" in result[0][1]
        assert "all ranks together have 1 values per channel" in result[1][1]


# ---------------------------------------------------------------------------------------------------------- conversion

def test_conversion_keeps_what_there_was():
    model = nn.Sequential(nn.BatchNorm1d(3, eps=0.5, momentum=0.25).double(), nn.Linear(3, 3),
                          nn.ModuleDict({"inner": nn.BatchNorm2d(3, affine=False, track_running_stats=False)}),
                          nn.SyncBatchNorm(3), nn.InstanceNorm1d(3))
    model[0].weight.requires_grad_(False)
    model[0].eval()
    model.append(model[0])  # the same layer twice
    before = {name: (id(t), t.requires_grad, t.dtype) for name, t in
              [*model.named_parameters(), *model.named_buffers()]}
    keys = list(model.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert [type(m).__name__ for m in model] == ["SyncBatchNorm", "Linear", "ModuleDict", "SyncBatchNorm",
                                                 "InstanceNorm1d", "SyncBatchNorm"]
    assert model[5] is model[0]
    assert isinstance(model[2]["inner"], SyncBatchNorm)
    assert (model[0].eps, model[0].momentum, model[0].training, model[3].training) == (0.5, 0.25, False, True)
    assert (model[2]["inner"].affine, model[2]["inner"].track_running_stats) == (False, False)
    assert {name: (id(t), t.requires_grad, t.dtype) for name, t in
            [*model.named_parameters(), *model.named_buffers()]} == before
    assert list(model.state_dict()) == keys
    assert SyncBatchNorm.convert_sync_batchnorm(model)[0] is model[0]
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)), SyncBatchNorm)


def test_a_lazy_layer_is_refused():
    with pytest.raises(ValueError, match="LazyBatchNorm1d.*run a forward"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def copies(group):
    layer = SyncBatchNorm(2, process_group=group)
    other = copy.deepcopy(nn.ModuleList([layer, layer]))
    other[0](torch.full((1, 2), float(group.rank())))
    return (other[0] is other[1], other[0].process_group is group, layer.num_batches_tracked.item(),
            other[0].num_batches_tracked.item())


def test_a_copy_talks_to_the_same_ranks(on_ranks):
    assert on_ranks(2, copies) == [(True, True, 0, 1)] * 2


def test_one_process_is_torch_s():
    group = unisono.init("serial", 0, 1)
    torch.manual_seed(0)
    one = nn.BatchNorm2d(3)
    ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(one), group)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(one(x), ours(x))
    assert torch.equal(one.running_var, ours.running_var)
