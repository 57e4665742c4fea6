#include "comm/torch_backend/staging.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <unisono/error.h>

#include <algorithm>
#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/c10d/tensors.h"

namespace unisono {
namespace {

[[noreturn]] void refuse(const char* operation, const std::string& problem) {
  throw Error(ErrorCode::invalid_argument, std::string("unisono ") + operation + ": " + problem);
}

void after(TorchWork::Call& call, std::function<void()> step) {
  if (!call.finish) {
    call.finish = std::move(step);
  } else {
    call.finish = [first = std::move(call.finish), second = std::move(step)] {
      first();
      second();
    };
  }
}

// The factor of PREMUL_SUM; nothing for other operations.
std::optional<at::Tensor> premultiplier(const c10d::ReduceOp& op) {
  if (static_cast<c10d::ReduceOp::RedOpType>(op) != c10d::ReduceOp::PREMUL_SUM) return std::nullopt;
  const auto* factor = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (factor == nullptr)
    refuse("all_reduce", "PREMUL_SUM comes without its factor; make it with torch.distributed's _make_nccl_premul_sum");
  return factor->tensor_factor.defined() ? factor->tensor_factor
                                         : at::scalar_tensor(factor->double_factor, at::kDouble);
}

bool in_order(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

}  // namespace

void check_dense_cpu(const at::Tensor& tensor, const char* operation) {
  if (!tensor.defined()) refuse(operation, "the tensor is undefined");
  if (!tensor.device().is_cpu())
    refuse(operation,
           "the tensor is on " + tensor.device().str() + "; this backend serves CPU tensors. Move it with .cpu()");
  if (tensor.layout() != at::kStrided) refuse(operation, "the tensor is sparse; convert it with .to_dense()");
}

at::Tensor contiguous_input(const at::Tensor& tensor, const char* operation) {
  check_dense_cpu(tensor, operation);
  const at::NoGradGuard no_grad;
  return in_order(tensor) ? tensor : tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor contiguous_output(TorchWork::Call& call, const at::Tensor& tensor, const char* operation, bool read) {
  check_dense_cpu(tensor, operation);
  if (in_order(tensor)) return tensor;
  at::Tensor staged = read ? contiguous_input(tensor, operation) : at::empty(tensor.sizes(), tensor.options());
  after(call, [tensor, staged] {
    const at::NoGradGuard no_grad;
    tensor.detach().copy_(staged);
  });
  return staged;
}

bool of_one_size(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.numel() == tensors.front().numel(); });
}

void check_alike(const std::vector<at::Tensor>& tensors, const at::Tensor& like, const char* operation) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check_dense_cpu(tensors[i], operation);
    if (tensors[i].numel() != like.numel() || tensors[i].scalar_type() != like.scalar_type())
      refuse(operation, "tensor " + std::to_string(i) + " of the list has " + std::to_string(tensors[i].numel()) +
                            " elements of " + at::toString(tensors[i].scalar_type()) +
                            ", the tensor of this rank has " + std::to_string(like.numel()) + " of " +
                            at::toString(like.scalar_type()) + "; they must be equal");
  }
}

Buffer moved_buffer(const at::Tensor& contiguous, const char* operation) {
  if (known_dtype(contiguous.scalar_type())) return buffer_of(contiguous, operation);
  return {.data = contiguous.data_ptr(),
          .count = contiguous.nbytes(),
          .dtype = Dtype::u8,
          .owner = std::make_shared<at::Tensor>(contiguous)};
}

at::Tensor flat_output(TorchWork::Call& call, const std::vector<at::Tensor>& tensors, const at::Tensor& like,
                       const char* operation) {
  check_alike(tensors, like, operation);
  const auto count = like.numel();
  at::Tensor flat = at::empty({count * static_cast<std::int64_t>(tensors.size())}, like.options());
  after(call, [tensors, flat, count] {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      tensors[i].detach().copy_(flat.narrow(0, static_cast<std::int64_t>(i) * count, count).view(tensors[i].sizes()));
  });
  return flat;
}

at::Tensor flat_input(const std::vector<at::Tensor>& tensors, const at::Tensor& like, const char* operation) {
  check_alike(tensors, like, operation);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.detach().resolve_conj().resolve_neg().reshape(-1));
  return at::cat(flat);
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* operation) {
  if (tensors.size() != 1) refuse(operation, "takes one tensor per process, got " + std::to_string(tensors.size()));
  return tensors[0];
}

void check_count(std::size_t count, int size, const char* operation) {
  if (count != static_cast<std::size_t>(size))
    refuse(operation, "the list has " + std::to_string(count) + " tensors, the group " + std::to_string(size) +
                          " ranks; give one tensor per rank");
}

const std::vector<at::Tensor>& only_list(const std::vector<std::vector<at::Tensor>>& lists, int size,
                                         const char* operation) {
  if (lists.size() != 1)
    refuse(operation, "takes one list of tensors per process, got " + std::to_string(lists.size()));
  check_count(lists[0].size(), size, operation);
  return lists[0];
}

void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* operation) {
  if (outputs.size() != inputs.size())
    refuse(operation, std::to_string(outputs.size()) + " outputs and " + std::to_string(inputs.size()) +
                          " inputs; they go in pairs");
}

at::Tensor multiplied(const at::Tensor& tensor, const c10d::ReduceOp& op, bool in_place) {
  const at::NoGradGuard no_grad;
  const auto factor = premultiplier(op);
  if (!factor) return tensor;
  check_dense_cpu(tensor, "PREMUL_SUM");
  return in_place ? tensor.detach().mul_(*factor) : tensor.detach().mul(*factor);
}

ReduceOp reduce_op_of(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* operation) {
  const auto type = static_cast<c10d::ReduceOp::RedOpType>(op);
  if (tensor.is_complex() && type != c10d::ReduceOp::SUM && type != c10d::ReduceOp::PREMUL_SUM &&
      type != c10d::ReduceOp::AVG)
    refuse(operation, "complex numbers can be reduced by SUM and AVG only");
  switch (type) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::bit_and;
    case c10d::ReduceOp::BOR:
      return ReduceOp::bit_or;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::bit_xor;
    default:
      refuse(operation, "this reduction is not known");
  }
}

}  // namespace unisono
