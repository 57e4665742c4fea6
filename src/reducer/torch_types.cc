#include "reducer/torch_types.h"

#include <unisono/error.h>

namespace unisono {

WireType wire_type(at::ScalarType type, const std::string& what) {
  switch (type) {
    case at::kFloat:
      return {Dtype::f32};
    case at::kDouble:
      return {Dtype::f64};
    case at::kHalf:
      return {Dtype::f16};
    case at::kBFloat16:
      return {Dtype::bf16};
    case at::kComplexFloat:
      return {Dtype::f32, 2};
    case at::kComplexDouble:
      return {Dtype::f64, 2};
    case at::kInt:
      return {Dtype::i32};
    case at::kLong:
      return {Dtype::i64};
    case at::kChar:
      return {Dtype::i8};
    case at::kByte:
      return {Dtype::u8};
    case at::kBool:
      return {Dtype::boolean};
    default:
      throw Error(ErrorCode::invalid_argument,
                  what + " has dtype " + at::toString(type) +
                      ", which unisono cannot send; supported are float, double, half, bfloat16, complex float and "
                      "double, and the integers of 8, 32 and 64 bits");
  }
}

Device place_of(const at::Tensor& tensor) {
  if (tensor.is_cuda()) return {Device::Kind::cuda, static_cast<int>(tensor.device().index())};
  return {Device::Kind::cpu, 0};
}

}  // namespace unisono
