#include "differential/average.h"

#include <cstring>
#include <limits>
#include <stdexcept>

#include "comm/reference.h"

namespace unisono::differential {
namespace {

Dtype wire_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat:
      return Dtype::f32;
    case at::kDouble:
      return Dtype::f64;
    case at::kHalf:
      return Dtype::f16;
    case at::kBFloat16:
      return Dtype::bf16;
    default:
      throw std::logic_error("no reference for this dtype");
  }
}

}  // namespace

at::Tensor average(const std::vector<at::Tensor>& per_rank, std::optional<double> divisor) {
  at::Tensor result = at::zeros(per_rank[0].sizes(), per_rank[0].options().requires_grad(false));
  if (divisor && *divisor == 0) return result;
  std::vector<testing::Bytes> inputs;
  for (const at::Tensor& tensor : per_rank) {
    const at::Tensor flat = tensor.detach().resolve_conj().resolve_neg().contiguous();
    const auto* data = static_cast<const unsigned char*>(flat.const_data_ptr());
    inputs.emplace_back(data, data + flat.nbytes());
  }
  const testing::Bytes mean = testing::reduce_reference(inputs, wire_of(result.scalar_type()),
                                                        divisor ? ReduceOp::sum : ReduceOp::avg, divisor.value_or(1));
  if (!mean.empty()) std::memcpy(result.data_ptr(), mean.data(), mean.size());
  return result;
}

double epsilon_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return 0x1p-10;
    case at::kBFloat16:
      return 0x1p-7;
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

}  // namespace unisono::differential
