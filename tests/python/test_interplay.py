"""What else of torch touches a wrapped module: compile, functional_call, hooks, copies, files, the profiler, averaging."""

import copy
import io
import pickle

import pytest
import torch
import unisono
from torch import nn
from unisono import DistributedDataParallel


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def batches(group, n=4):
    return torch.randn(n, 3, 6, generator=torch.Generator().manual_seed(group.rank()))


def train(group, forward, module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for batch in batches(group):
        optimizer.zero_grad()
        forward(batch).pow(2).mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def compiled(group, how, backend):
    module = net()
    if how == "inner":
        forward = DistributedDataParallel(torch.compile(module, backend=backend), process_group=group)
    else:
        forward = torch.compile(DistributedDataParallel(module, process_group=group), backend=backend)
    values = train(group, forward, module)
    plain = net()
    reference = train(group, DistributedDataParallel(plain, process_group=group), plain)
    return (values - reference).abs().max().item(), values.tolist()


@pytest.mark.parametrize("how", ["inner", "wrapped"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(on_ranks, how, backend):
    (difference, values), (_, other) = on_ranks(2, compiled, how, backend)
    assert values == other
    assert difference < 1e-6  # compiled backwards may add in another order


def with_functional_call(group):
    module = net()
    ddp = DistributedDataParallel(module, process_group=group)
    x = batches(group)[0]
    doubled = {name: 2 * p for name, p in module.named_parameters()}
    torch.func.functional_call(module, doubled, (x,)).pow(2).mean().backward()
    chained = [p.grad.clone() for p in module.parameters()]
    other = net()
    ddp2 = DistributedDataParallel(other, process_group=group)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    ddp2(x).pow(2).mean().backward()
    del ddp
    return max((a - 2 * p.grad).abs().max().item() for a, p in zip(chained, other.parameters(), strict=True))


def test_functional_call(on_ranks):
    assert max(on_ranks(2, with_functional_call)) < 1e-6  # powers of two are exact; sums of f32 products are compared


def with_hooks(group):
    module = net()
    ddp = DistributedDataParallel(module, process_group=group)
    seen = []
    module.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    ddp.register_forward_hook(lambda m, args, out: seen.append("wrapper"))
    module[2].register_full_backward_hook(lambda m, gin, gout: seen.append("backward"))
    module[0].weight.register_hook(lambda g: g * 2)
    ddp(torch.full((1, 6), group.rank() + 1.0)).sum().backward()
    plain = net()
    other = DistributedDataParallel(plain, process_group=group)
    other(torch.full((1, 6), group.rank() + 1.0)).sum().backward()
    return seen, torch.equal(module[0].weight.grad, 2 * plain[0].weight.grad)


def test_module_and_tensor_hooks(on_ranks):
    assert on_ranks(2, with_hooks) == [(["pre", "wrapper", "backward"], True)] * 2


def copies(group):
    ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0)
    twin = copy.deepcopy(ddp)
    before = ddp.digest()
    train(group, twin, twin.module)
    average = copy.deepcopy(ddp.module)  # as for a moving average of the parameters
    file = io.BytesIO()
    torch.save(ddp.state_dict(), file)
    file.seek(0)
    plain = net()
    plain.load_state_dict(torch.load(file))
    try:
        pickle.dumps(ddp)
    except TypeError as error:
        refused = str(error)
    return (ddp.digest() == before != twin.digest(), twin.replicas_identical(), len(twin.bucket_sizes) == 4,
            all(p.requires_grad for p in average.parameters()), "save ddp.state_dict()" in refused)


def test_copies_and_pickles(on_ranks):
    assert on_ranks(2, copies) == [(True,) * 5] * 2


def attributes(group):
    module = net()
    module.note = "mine"
    ddp = DistributedDataParallel(module, process_group=group)
    ddp.train(False)
    try:
        ddp.nothing  # noqa: B018
    except AttributeError as error:
        missing = str(error)
    return ddp.note, module.training, len(list(ddp.parameters())), "nothing" in missing, next(iter(ddp.named_parameters()))[0]


def test_attributes(on_ranks):
    assert on_ranks(2, attributes) == [("mine", False, 4, True, "module.0.weight")] * 2


def profiled(group):
    module = net()
    ddp = DistributedDataParallel(module, process_group=group)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(batches(group)[0]).sum().backward()
    names = {event.key for event in profile.key_averages()}
    return {"DistributedDataParallel.forward", "unisono.launch", "unisono.wait"} <= names


def test_profiler_ranges(on_ranks):
    assert on_ranks(2, profiled) == [True, True]


def averaged(group, period, momentum):
    module = net()
    averager = unisono.ParameterAverager(module, period, process_group=group)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=momentum)
    did = []
    for batch in batches(group):
        optimizer.zero_grad()
        module(batch).pow(2).mean().backward()
        optimizer.step()
        did.append(averager.step())
    other = net()
    ddp = DistributedDataParallel(other, process_group=group)
    optimizer = torch.optim.SGD(other.parameters(), 0.1, momentum=momentum)
    for batch in batches(group):
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()
        optimizer.step()
    values, reference = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (module, other))
    return did, (values - reference).abs().max().item(), values.tolist()


def test_averaging_parameters(on_ranks):
    results = on_ranks(2, averaged, 1, 0.0)
    assert results[0][0] == [True] * 4 and results[0][2] == results[1][2]
    assert results[0][1] < 1e-6  # without momentum it is the same step, up to rounding
    results = on_ranks(2, averaged, 2, 0.9)
    assert results[0][0] == [False, True] * 2 and results[0][2] == results[1][2]
    assert results[0][1] > 1e-4  # momentum has seen other gradients


def post_local(group):
    module = net()
    ddp = DistributedDataParallel(module, process_group=group)
    ddp.set_transform(unisono.transforms.post_local_sgd(start_step=2))
    averager = unisono.ParameterAverager(ddp, 2, warmup=3)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    same = []
    for batch in batches(group, 6):
        optimizer.zero_grad()
        ddp(batch).pow(2).mean().backward()
        optimizer.step()
        same.append(ddp.replicas_identical())
        averager.step()
    return same, ddp.replicas_identical()


def test_post_local_sgd(on_ranks):
    assert on_ranks(2, post_local) == [([True, True, False, False, False, False], True)] * 2


def stats(group):
    import json

    ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0)
    for batch in batches(group):
        if group.rank() == 1:
            sum(range(3_000_000))  # late
        ddp(batch).pow(2).mean().backward()
    step = ddp.stats
    line = json.loads(step.to_json())
    ordered = all(b.first_ready_ns <= b.ready_ns <= b.launched_ns <= b.done_ns for b in step.buckets if b.ready_ns)
    return (len(step.buckets), [len(b.arrivals_ns) for b in step.buckets], ordered, step.straggler.rank,
            step.straggler.late_s > 0.001, line["straggler"]["rank"], line["step"], len(line["buckets"]), step.hidden_s >= 0)


def test_statistics_name_the_straggler(on_ranks):
    for result in on_ranks(2, stats):
        assert result == (4, [2] * 4, True, 1, True, 1, 3, 4, True)
