"""all_reduce of sparse tensors on init_process_group("unisono"), and stock DDP with sparse embeddings: as on Gloo."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import outcome_of
from torch import nn
from torch_group import torch_group

OF_GLOO = [torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8]
NOT_OF_GLOO = [torch.float16, torch.bfloat16, torch.int16]
SHAPES = {  # sizes, sparse dimensions
    "1-D": ([9], 1), "2-D": ([5, 4], 2), "3-D": ([3, 4, 2], 3), "rows": ([7, 3], 1), "hybrid": ([4, 3, 2, 2], 2),
    "no dense elements": ([4, 0], 1), "no sparse dimension": ([3], 0),
}
COUNTS = {"as many": (4, 4, 4), "more and more": (1, 4, 9), "first has none": (0, 3, 2), "last has none": (5, 3, 0), "none": (0, 0, 0)}


def entries(rank, sizes, sparse_dim, count, dtype, coalesced=False):
    """Small whole numbers, exact in every dtype; indices come twice and out of order."""
    generator = torch.Generator().manual_seed(10 * count + rank)
    indices = [torch.randint(0, size, (count,), generator=generator) for size in sizes[:sparse_dim]]
    indices = torch.stack(indices) if sparse_dim else torch.zeros(0, count, dtype=torch.long)
    values = torch.randint(1, 4, (count, *sizes[sparse_dim:]), generator=generator).to(dtype)
    made = torch.sparse_coo_tensor(indices, values, sizes)
    return made.coalesce() if coalesced else made


def parts(tensor):
    return tensor.is_coalesced(), tensor._indices(), tensor._values(), tensor.size(), tensor.dtype


def assert_same(left, right, what):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (what, left, right)


def all_sums(backend, dtype):
    with torch_group(backend):
        rank, results = dist.get_rank(), {}
        for shape, (sizes, sparse_dim) in SHAPES.items():
            for counts, of_rank in COUNTS.items():
                for coalesced in (False, True):
                    if backend == "gloo" and shape in ("no dense elements", "no sparse dimension"):
                        continue
                    t = entries(rank, sizes, sparse_dim, of_rank[rank], dtype, coalesced)
                    dist.all_reduce(t)
                    results[shape, counts, coalesced] = parts(t)
        return results


def expected_sum(shape, counts, dtype, coalesced):
    """From dense tensors, so that nothing here depends on coalesce()."""
    sizes, sparse_dim = SHAPES[shape]
    return sum(entries(rank, sizes, sparse_dim, COUNTS[counts][rank], dtype, coalesced).to_dense() for rank in range(3))


@pytest.mark.parametrize("dtype", OF_GLOO + NOT_OF_GLOO, ids=str)
def test_sums_equal_gloo(on_ranks, dtype):
    ours = on_ranks(3, all_sums, "unisono", dtype, group=False)
    for case, (coalesced, indices, values, sizes, of) in ours[0].items():
        assert coalesced and of == dtype, case
        dense = torch.sparse_coo_tensor(indices, values, sizes).to_dense()
        assert torch.equal(dense, expected_sum(case[0], case[1], dtype, case[2])), case
    theirs = on_ranks(3, all_sums, "gloo", dtype, group=False) if dtype in OF_GLOO else ours
    for rank in range(3):
        for case, result in ours[rank].items():
            assert_same(result, ours[0][case], case)
            if case in theirs[rank]:
                assert_same(result, theirs[rank][case], case)


def odd_numbers(backend):
    with torch_group(backend):
        generator = torch.Generator().manual_seed(dist.get_rank())
        t = torch.sparse_coo_tensor(torch.randint(0, 40, (1, 200), generator=generator),
                                    torch.randn(200, 5, generator=generator), (40, 5))
        dense = t.coalesce().to_dense()
        dist.all_reduce(t)
        dist.all_reduce(dense)
        return parts(t), t.to_dense(), dense


@pytest.mark.parametrize("ranks", [3, 4])
def test_bits_are_those_of_a_dense_sum_on_all_ranks(on_ranks, ranks):
    results = on_ranks(ranks, odd_numbers, "unisono", group=False)
    for mine, summed, dense in results:
        assert_same(mine, results[0][0], "ranks")
        assert torch.equal(summed, dense)
    if ranks == 3:  # of more, Gloo adds each to the sum of those before it
        for theirs, _, _ in on_ranks(3, odd_numbers, "gloo", group=False):
            assert_same(theirs, results[0][0], "gloo")


def small_and_large(dtype):
    with torch_group("unisono"):
        value = 1.0 if dist.get_rank() == 0 else torch.finfo(dtype).eps / 2
        t = torch.sparse_coo_tensor([[2]], torch.tensor([value], dtype=dtype), (3,))
        dist.all_reduce(t)
        return t.to_dense()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_rounded_once(on_ranks, dtype):
    for dense in on_ranks(3, small_and_large, dtype, group=False):
        assert dense.tolist() == [0, 0, 1 + torch.finfo(dtype).eps]  # rounded at each addition it is 1


def grad_of_embedding():
    with torch_group("unisono"):
        rank = dist.get_rank()
        layer = nn.Embedding(4, 2, sparse=True)
        layer(torch.tensor([rank])).sum().backward()  # one entry, its values expanded
        grad = layer.weight.grad
        assert dist.all_reduce(grad) is None
        alone = dist.new_group([0]), dist.new_group([1])
        own = entries(rank, [4], 1, 3, torch.float32)
        for _ in range(2):  # the second time it is coalesced
            dist.all_reduce(own, group=alone[rank])
        leaf = torch.sparse_coo_tensor([[rank]], [1.0], (2,)).requires_grad_()
        dist.all_reduce(leaf)
        return grad is layer.weight.grad and parts(grad), parts(own), parts(leaf)


def test_gradients_single_ranks_and_leaves(on_ranks):
    for rank, (grad, own, leaf) in enumerate(on_ranks(2, grad_of_embedding, group=False)):
        assert grad[0] and grad[1].tolist() == [[0, 1]] and torch.equal(grad[2], torch.ones(2, 2))
        assert_same(own, parts(entries(rank, [4], 1, 3, torch.float32, coalesced=True)), "one rank")
        assert leaf[1].tolist() == [[0, 1]] and leaf[2].tolist() == [1.0, 1.0]


def mine_of(rank, i=0):
    return torch.sparse_coo_tensor([[rank, 2]], [1.0 + i, 1.0 + rank], (4,))


def sum_of_two(i=0):
    return [1.0 + i, 1.0 + i, 3.0, 0.0]


def call_comes_back():
    with torch_group("unisono", timeout=20):
        t = mine_of(dist.get_rank())
        if dist.get_rank() == 0:
            work = dist.all_reduce(t, async_op=True)
            dist.send(torch.ones(1), 1)  # the other rank makes its call only then
            work.wait()
        else:
            dist.recv(torch.zeros(1), 0)
            dist.all_reduce(t)
        return t.to_dense().tolist()


def nobody_waits():
    with torch_group("unisono", timeout=20):
        t = mine_of(dist.get_rank())
        if dist.get_rank() == 0:
            dist.all_reduce(t)
            dist.send(torch.ones(1), 1)
        else:
            work = dist.all_reduce(t, async_op=True)
            dist.recv(torch.zeros(1), 0)  # comes once the other rank has the sum
            work.wait()
        return t.to_dense().tolist()


def future_of_a_later_message():
    with torch_group("unisono", timeout=20):
        t = mine_of(dist.get_rank())
        if dist.get_rank() == 0:
            came = dist.irecv(torch.zeros(1), 1).get_future()
            work = dist.all_reduce(t, async_op=True)
            came.wait()
            work.wait()
        else:
            dist.all_reduce(t)
            dist.send(torch.ones(1), 0)
        return t.to_dense().tolist()


@pytest.mark.parametrize("program", [call_comes_back, nobody_waits, future_of_a_later_message], ids=lambda f: f.__name__)
def test_no_rank_holds_up_another(on_ranks, program):
    assert on_ranks(2, program, group=False) == [sum_of_two()] * 2


def among_others():
    with torch_group("unisono"):
        rank = dist.get_rank()
        sparse, dense = [mine_of(rank, i) for i in range(6)], [torch.full((50,), float(rank + i)) for i in range(6)]
        works = []
        for s, d in zip(sparse, dense, strict=True):
            works += [dist.all_reduce(s, async_op=True), dist.all_reduce(d, async_op=True)]
        seen = [works[0].get_future().then(lambda f: f.value()[0].to_dense().tolist()),
                works[4].get_future().then(lambda f: dist.all_reduce(torch.ones(1), async_op=True) is not None)]
        for work in works if rank else reversed(works):
            assert work.wait() and work.is_completed() and work.is_success()
        polled = mine_of(rank)
        work = dist.all_reduce(polled, async_op=True)
        while not work.is_completed():
            pass
        assert work.result()[0] is polled
        return [s.to_dense().tolist() for s in sparse], [d[0].item() for d in dense], [f.wait() for f in seen], polled.to_dense().tolist()


def test_among_other_calls_waited_for_in_any_order(on_ranks):
    for sparse, dense, seen, polled in on_ranks(2, among_others, group=False):
        assert sparse == [sum_of_two(i) for i in range(6)]
        assert dense == [2.0 * i + 1 for i in range(6)]
        assert seen == [sum_of_two(), True] and polled == sum_of_two()


def refusals():
    with torch_group("unisono"):
        raised = [outcome_of(lambda op=op: dist.all_reduce(mine_of(dist.get_rank()), op=op))
                  for op in (dist.ReduceOp.MAX, dist.ReduceOp.AVG)]
        many = torch.sparse_coo_tensor(torch.zeros(30, 1, dtype=torch.long), [1.0], (1,) * 30)
        others = [outcome_of(lambda: dist.all_reduce(many)), outcome_of(lambda: dist.all_reduce(torch.eye(2).to_sparse_csr())),
                  outcome_of(lambda: dist.broadcast(mine_of(0), 0))]
        t = mine_of(dist.get_rank())
        dist.all_reduce(t)
        return raised, others, t.to_dense().tolist()


def test_what_is_not_there_is_named_and_breaks_nothing(on_ranks):
    for ops, (many, compressed, broadcast), good in on_ranks(2, refusals, group=False):
        for raised in ops:
            assert raised.type == "InvalidArgumentError" and "SUM" in raised.message and "to_dense" in raised.message
        assert many.type == "InvalidArgumentError" and "30" in many.message and "28" in many.message
        assert compressed.type in ("InvalidArgumentError", "RuntimeError", "NotImplementedError")
        assert broadcast.type in ("InvalidArgumentError", "RuntimeError", "NotImplementedError")
        assert good == sum_of_two()


UNLIKE = {
    "sizes": (lambda: torch.eye(3).to_sparse(), lambda: torch.ones(3, 5).to_sparse(), ["[3, 3]", "[3, 5]"]),
    "dimensions": (lambda: torch.ones(6).to_sparse(), lambda: torch.ones(6, 1).to_sparse(), ["[6]", "[6, 1]"]),
    "sparse dimensions": (lambda: torch.eye(3).to_sparse(1), lambda: torch.eye(3).to_sparse(2), ["1 sparse and 1", "2 sparse and 0"]),
    "dtype": (lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).double().to_sparse(), ["Float", "Double"]),
    "empty": (lambda: torch.zeros(3).to_sparse(), lambda: torch.zeros(4).to_sparse(), ["[3]", "[4]"]),
    "dense": (lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3), ["sparse tensor", "all_reduce"]),
}


def unlike(kind, hosts=False):
    if hosts:
        os.environ["UNISONO_HOST_PART"] = os.environ["RANK"]
    with torch_group("unisono", timeout=20):
        call = UNLIKE[kind][min(dist.get_rank(), 1)]
        return outcome_of(lambda: dist.all_reduce(call())), outcome_of(lambda: dist.all_reduce(torch.ones(2)))


@pytest.mark.parametrize("kind", UNLIKE)
def test_unlike_tensors_are_named_on_all_ranks(on_ranks, kind):
    for raised, later in on_ranks(3, unlike, kind, group=False):
        assert raised.type == "MismatchError" and later.type == "MismatchError", (raised, later)
        for words in UNLIKE[kind][2]:
            assert words in raised.message and words in later.message


def on_two_hosts(dtype):
    os.environ["UNISONO_HOST_PART"] = os.environ["RANK"]
    with torch_group("unisono"):
        t = mine_of(dist.get_rank()).to(dtype)
        works = [dist.all_reduce(t, async_op=True), dist.all_reduce(torch.ones(1), async_op=True)]
        value = works[0].get_future().then(lambda f: f.value()[0].to_dense().tolist()).wait()
        works[1].wait()
        return t.dtype, t.is_coalesced(), t.to_dense().tolist(), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_over_two_hosts(on_ranks, dtype):
    assert on_ranks(2, on_two_hosts, dtype, group=False) == [(dtype, True, sum_of_two(), sum_of_two())] * 2


@pytest.mark.parametrize("kind", ["sizes", "sparse dimensions", "dtype"])
def test_unlike_tensors_over_two_hosts(on_ranks, kind):
    for raised, _ in on_ranks(2, unlike, kind, True, group=False):
        assert raised.type == "MismatchError", raised
        for words in UNLIKE[kind][2]:
            assert words in raised.message


class Words(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.out = nn.Linear(8, 4) if dense else nn.Identity()

    def forward(self, x):
        return self.out(self.words(x).mean(1))


def train(backend, dense):
    with torch_group(backend):
        rank = dist.get_rank()
        torch.manual_seed(7 + rank)
        model = Words(dense)
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(8):
            generator = torch.Generator().manual_seed(1000 * rank + step)
            x = torch.randint(0, 50, (6, 3 + rank), generator=generator)  # other numbers of rows on each rank
            optimizer.zero_grad()
            ddp(x).square().sum().backward()
            assert model.words.weight.grad.is_sparse
            optimizer.step()
        del ddp  # while the group lives: see test_torch_backend.py
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ranks, dense", [(2, True), (2, False), (3, True), (3, False)])
def test_stock_ddp_with_a_sparse_embedding_trains_as_on_gloo(on_ranks, ranks, dense):
    ours = on_ranks(ranks, train, "unisono", dense, group=False)
    theirs = on_ranks(ranks, train, "gloo", dense, group=False)
    for parameters in ours[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters, ours[0], strict=True))
    for a, b in zip(ours[0], theirs[0], strict=True):
        if ranks == 3 and dense:  # three dense gradients are added in another order: a few roundings of f32 in 8 steps
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(a, b)
