"""Random programs in Python, ours on two ranks against plain autograd in this process; see docs/differential.md.

The C++ driver does the most of it. Here is what only Python has: outputs of any type, module hooks, the no_sync
context, checkpoints, exceptions that pass through the engine.
"""

import dataclasses

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

WORLD = 2


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    note: str = ""


class Throw(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("the user's own error")


class Net(nn.Module):
    """One of two branches, a head, and a parameter that nothing uses."""

    def __init__(self, hooks):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.left, self.right, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=generator) - 0.5)
        if hooks:
            self.head.register_forward_hook(lambda module, args, output: output * 2)
            self.left.register_full_backward_hook(lambda module, grad_in, grad_out: None)

    def forward(self, x, left, kind, recompute, throws=None):
        branch = self.left if left else self.right
        hidden = x if recompute is None else x.requires_grad_()
        hidden = branch(x) if recompute is None else checkpoint(branch, hidden, use_reentrant=recompute == "reentrant")
        if throws == "forward":
            raise RuntimeError("the user's own error")
        if throws == "backward":
            hidden = Throw.apply(hidden)
        loss = self.head(torch.tanh(hidden)).square().mean()
        return {"tensor": loss, "tuple": (x, loss), "dict": {"aux": [x], "loss": loss}, "dataclass": Output(loss)}[kind]


def loss_of(output):
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Output):
        return output.loss
    return output["loss"] if isinstance(output, dict) else output[1]


micros = st.fixed_dictionaries({
    "left": st.tuples(st.booleans(), st.booleans()), "seed": st.integers(0, 1000),
    "n": st.tuples(st.integers(0, 5), st.integers(0, 5))})
steps = st.fixed_dictionaries({
    "local": st.lists(micros, max_size=2), "last": micros,
    "throws": st.sampled_from([None, None, None, "forward", "backward"]), "thrower": st.integers(0, WORLD - 1),
    "zero": st.sampled_from(["none", "in place", "keep"]), "step": st.booleans()})
cases = st.fixed_dictionaries({
    "kind": st.sampled_from(["tensor", "tuple", "dict", "dataclass"]), "hooks": st.booleans(),
    "recompute": st.sampled_from([None, None, "reentrant", "plain"]), "weighted": st.booleans(),
    "momentum": st.sampled_from([0.0, 0.9]),
    "options": st.fixed_dictionaries({
        "gradient_as_bucket_view": st.booleans(), "find_unused_parameters": st.booleans(),
        "bucket_cap_mb": st.sampled_from([None, 0, 0.0001]), "overlap": st.booleans(), "static_graph": st.booleans()}),
    # Three: what is silent for longer may come late and be rounded otherwise.
    "steps": st.lists(steps, min_size=1, max_size=3)})


def batch(micro, rank):
    return torch.rand(3, 4, generator=torch.Generator().manual_seed(micro["seed"] * WORLD + rank)) - 0.5


def zero(model, case, step):
    # In a weighted window what a gradient holds is set aside: the reference below does without.
    if case["weighted"] or step["zero"] == "none":
        model.zero_grad()
    elif step["zero"] == "in place":
        model.zero_grad(set_to_none=False)


def gradients_of(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def run_cases(group, batch_of_cases):
    from unisono import DistributedDataParallel

    return [run_case(group, case, DistributedDataParallel) for case in batch_of_cases]


def run_case(group, case, wrap):
    rank = group.rank()
    ddp = wrap(Net(case["hooks"]), process_group=group, **case["options"])
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=case["momentum"])
    out = []

    def backward(micro, throws=None):
        loss = loss_of(ddp(batch(micro, rank), micro["left"][rank], case["kind"], case["recompute"], throws))
        (ddp.weight(loss, micro["n"][rank]) if case["weighted"] else loss).backward()

    for step in case["steps"]:
        errors = []
        throws = step["throws"] if step["thrower"] == rank else None
        try:
            if step["throws"] == "backward" or throws:
                backward(step["last"], throws)
        except Exception as error:
            errors.append(str(error))
        if step["throws"] == "backward":
            ddp.zero_grad()
        for micro in step["local"]:
            with ddp.no_sync():
                backward(micro)
        backward(step["last"])
        gradients = gradients_of(ddp)
        if step["step"]:
            sgd.step()
        zero(ddp, case, step)
        out.append((errors, gradients, [p.detach().clone() for p in ddp.parameters()]))
    return out


class Reference:
    """The same for one rank after the other; averages in place of messages."""

    def __init__(self, case):
        self.case, self.models = case, [Net(case["hooks"]) for _ in range(WORLD)]
        self.sgds = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=case["momentum"]) for m in self.models]

    def step(self, step):
        if step["throws"] == "backward":
            for model in self.models:
                model.zero_grad()
        fired = [False] * len(list(self.models[0].parameters()))
        for rank, model in enumerate(self.models):
            for micro in [*step["local"], step["last"]]:
                loss = loss_of(model(batch(micro, rank), micro["left"][rank], "tensor", None))
                (loss * micro["n"][rank] if self.case["weighted"] else loss).backward()
                for i, (name, _) in enumerate(model.named_parameters()):
                    fired[i] |= name.split(".")[0] in ("head", "left" if micro["left"][rank] else "right")
        total = sum(sum(micro["n"]) for micro in [*step["local"], step["last"]]) if self.case["weighted"] else WORLD
        for parameters, used in zip(zip(*(m.parameters() for m in self.models), strict=True), fired, strict=True):
            if not used:
                continue
            a, b = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
            for p in parameters:
                p.grad = (a + b) / total if total else torch.zeros_like(a)
        gradients = gradients_of(self.models[0])
        for model, sgd in zip(self.models, self.sgds, strict=True):
            if step["step"]:
                sgd.step()
            zero(model, self.case, step)
        return gradients, [p.detach() for p in self.models[0].parameters()]


def same(ours, expected, exact):
    if ours is None or expected is None:
        return ours is expected
    return torch.equal(ours, expected) if exact else torch.allclose(ours, expected, rtol=1e-5, atol=1e-7)


def compare(case, results):
    # The walk does not see into reentrant checkpoints: their gradients may come late, and two averages are added.
    exact = not (case["options"]["find_unused_parameters"] and case["recompute"] == "reentrant")
    reference = Reference(case)
    for i, step in enumerate(case["steps"]):
        gradients, parameters = reference.step(step)
        for rank in range(WORLD):
            errors, ours, our_parameters = results[rank][i]
            where = f"step {i} rank {rank} of {case}"
            own = step["throws"] is not None and step["thrower"] == rank
            told = step["throws"] == "backward" and not own
            assert len(errors) == own + told, f"{errors} in {where}"
            if own:
                assert "the user's own error" in errors[0], where
            if told:
                assert f"rank {step['thrower']} threw in its backward" in errors[0], f"{errors} in {where}"
            for mine, first, expected in zip(ours, results[0][i][1], gradients, strict=True):
                assert same(mine, first, True), f"ranks differ: {mine} {first} in {where}"
                assert same(mine, expected, exact), f"{mine} is not {expected} in {where}"
            for mine, first, expected in zip(our_parameters, results[0][i][2], parameters, strict=True):
                assert same(mine, first, True), f"ranks differ: {mine} {first} in {where}"
                assert same(mine, expected, exact), f"{mine} is not {expected} in {where}"


@settings(max_examples=6, derandomize=True, deadline=None, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large])
@given(batch_of_cases=st.lists(cases, min_size=10, max_size=20))
def test_random_programs(on_ranks, batch_of_cases):
    results = on_ranks(WORLD, run_cases, batch_of_cases)
    for i, case in enumerate(batch_of_cases):
        compare(case, [rank[i] for rank in results])
