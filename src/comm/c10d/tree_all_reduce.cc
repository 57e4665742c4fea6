#include "comm/c10d/tree_all_reduce.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "comm/c10d/tensors.h"
#include "comm/reduce_kernels.h"

namespace unisono {
namespace {

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.view(at::kByte); }

// Rows `begin` to `end` of `rows`, in the order of tree_reduce.
at::Tensor tree_sum(const at::Tensor& rows, std::int64_t begin, std::int64_t end) {
  if (end - begin == 1) return rows[begin];
  std::int64_t half = 1;
  while (2 * half < end - begin) half *= 2;
  return tree_sum(rows, begin, begin + half) + tree_sum(rows, begin + half, end);
}

// The rows of `parts` in CPU memory, reduced.
void reduce_rows(const at::Tensor& parts, const Buffer& out, ReduceOp op, double divisor) {
  std::vector<const void*> in;
  for (std::int64_t r = 0; r < parts.size(0); ++r) in.push_back(parts[r].const_data_ptr());
  tree_reduce(in, std::span<void* const>(&out.data, 1), out.count, out.dtype, op, divisor);
}

// The rows of `parts`, reduced and divided, into `out`.
void reduce_rows(const at::Tensor& parts, const at::Tensor& out, Dtype dtype, ReduceOp op, double divisor) {
  if (parts.is_cpu()) {
    return reduce_rows(parts, {out.data_ptr(), static_cast<std::size_t>(out.numel()), dtype}, op, divisor);
  }
  at::Tensor sum = tree_sum(parts.to(at::kFloat), 0, parts.size(0));
  out.copy_(divisor == 0 ? at::zeros_like(sum) : sum / divisor);
}

// Between two ranks the slices and the sums are together as many bytes as the whole: one message will do.
EngineOp of_two(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Buffer& data, ReduceOp op,
                std::chrono::milliseconds timeout) {
  at::Tensor mine = tensor_of(data);
  at::Tensor parts = at::empty({2, mine.numel()}, mine.options());
  at::Tensor to = bytes_of(parts.view({-1})), from = bytes_of(mine.is_cpu() ? mine.clone() : mine);
  auto gathered = in_flight(group->all_gather_single(to, from, with<c10d::AllgatherOptions>(timeout)), {to, from});
  gathered.finish = [=, dtype = data.dtype](double divisor) {
    const at::NoGradGuard no_grad;
    reduce_rows(parts, mine, dtype, op, divisor);
  };
  return gathered;
}

}  // namespace

EngineOp tree_reduce_scatter(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const DataCall& call,
                             std::chrono::milliseconds timeout) {
  at::Tensor in = tensor_of(call.in);
  at::Tensor parts = at::empty({group->getSize(), static_cast<std::int64_t>(call.out.count)}, in.options());
  at::Tensor to = bytes_of(parts.view({-1})), from = bytes_of(in.clone());  // see Engine::start
  std::vector<std::int64_t> equal;
  auto op =
      in_flight(group->all_to_all_single(to, from, equal, equal, with<c10d::AllToAllOptions>(timeout)), {to, from});
  op.finish = [parts, out = call.out, how = call.op == ReduceOp::avg ? ReduceOp::sum : call.op](double divisor) {
    reduce_rows(parts, out, how, divisor);
  };
  return op;
}

EngineOp tree_all_reduce(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const DataCall& call,
                         std::chrono::milliseconds timeout) {
  const std::int64_t world = group->getSize();
  const Buffer& data = call.out;
  const ReduceOp op = call.op == ReduceOp::avg ? ReduceOp::sum : call.op;
  if (world == 2) return of_two(group, data, op, timeout);
  const auto count = static_cast<std::int64_t>(data.count);
  const std::int64_t slice = (count + world - 1) / world;
  at::Tensor mine = tensor_of(data);
  at::Tensor padded = mine;
  if (slice * world != count) {
    padded = at::zeros({slice * world}, mine.options());
    padded.narrow(0, 0, count).copy_(mine);
  } else if (mine.is_cpu() && !data.owner) {
    padded = mine.clone();  // or it might be gone before the engine has read it, see Engine::start
  }
  at::Tensor parts = at::empty({world, slice}, mine.options());
  at::Tensor to = bytes_of(parts.view({-1})), from = bytes_of(padded);
  std::vector<std::int64_t> equal;
  auto first =
      in_flight(group->all_to_all_single(to, from, equal, equal, with<c10d::AllToAllOptions>(timeout)), {to, from});
  first.then = [=, dtype = data.dtype](double divisor) mutable {
    const at::NoGradGuard no_grad;
    at::Tensor own = at::empty({parts.size(1)}, parts.options());
    reduce_rows(parts, own, dtype, op, divisor);
    at::Tensor whole = mine.is_cpu() ? parts.view({-1}) : padded;  // the parts have been read
    at::Tensor sum = bytes_of(own), all = bytes_of(whole);
    auto second = in_flight(group->all_gather_single(all, sum, with<c10d::AllgatherOptions>(timeout)), {all, sum});
    second.finish = [mine, whole, count](double) {
      const at::NoGradGuard no_grad;
      if (mine.data_ptr() != whole.data_ptr()) mine.copy_(whole.narrow(0, 0, count));
    };
    return second;
  };
  return first;
}

}  // namespace unisono
