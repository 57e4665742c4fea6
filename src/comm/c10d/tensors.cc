#include "comm/c10d/tensors.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <unisono/error.h>

#include <memory>

namespace unisono {

std::optional<Dtype> known_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat:
      return Dtype::f32;
    case at::kDouble:
    case at::kComplexDouble:
      return Dtype::f64;
    case at::kHalf:
      return Dtype::f16;
    case at::kBFloat16:
      return Dtype::bf16;
    case at::kChar:
      return Dtype::i8;
    case at::kByte:
      return Dtype::u8;
    case at::kInt:
      return Dtype::i32;
    case at::kLong:
      return Dtype::i64;
    case at::kBool:
      return Dtype::boolean;
    default:
      return std::nullopt;
  }
}

Dtype dtype_of(at::ScalarType type, const char* operation) {
  if (const auto dtype = known_dtype(type)) return *dtype;
  throw Error(
      ErrorCode::invalid_argument,
      std::string("unisono ") + operation + ": tensors of dtype " + at::toString(type) +
          " cannot be sent; convert to float, double, half, bfloat16, complex, bool or an integer of 8, 32 or 64 bits");
}

at::ScalarType scalar_type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return at::kFloat;
    case Dtype::f64:
      return at::kDouble;
    case Dtype::f16:
      return at::kHalf;
    case Dtype::bf16:
      return at::kBFloat16;
    case Dtype::i8:
      return at::kChar;
    case Dtype::u8:
      return at::kByte;
    case Dtype::i32:
      return at::kInt;
    case Dtype::i64:
      return at::kLong;
    case Dtype::boolean:
      return at::kBool;
  }
  throw Error(ErrorCode::internal, "unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

at::Tensor real_view(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

Buffer buffer_of(const at::Tensor& contiguous, const char* operation) {
  const at::Tensor real = real_view(contiguous);
  Device device;
  if (real.is_cuda()) device = {Device::Kind::cuda, static_cast<int>(real.device().index())};
  return {real.data_ptr(), static_cast<std::size_t>(real.numel()), dtype_of(real.scalar_type(), operation), device,
          std::make_shared<at::Tensor>(real)};
}

at::Tensor tensor_of(const Buffer& buffer) {
  const at::Device device = buffer.device.kind == Device::Kind::cpu
                                ? at::Device(at::kCPU)
                                : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(buffer.device.index));
  return at::from_blob(
      buffer.data, {static_cast<std::int64_t>(buffer.count)}, [owner = buffer.owner](void*) {},
      at::TensorOptions().dtype(scalar_type_of(buffer.dtype)).device(device), device);
}

}  // namespace unisono
