#pragma once

#include <ATen/core/Tensor.h>
#include <unisono/buffer.h>

#include <optional>

namespace unisono {

/// The dtype a torch dtype travels as; nothing when ranks cannot calculate with it.
std::optional<Dtype> known_dtype(at::ScalarType type);
/// The dtype a torch dtype travels as; complex numbers as their real parts (see `real_view`).
/// *Throws* `invalid_argument` naming `operation` and the dtype when it cannot travel.
Dtype dtype_of(at::ScalarType type, const char* operation);
at::ScalarType scalar_type_of(Dtype dtype);

/// The same memory with complex numbers as pairs of reals; other tensors as they are.
at::Tensor real_view(const at::Tensor& tensor);

/// A contiguous tensor's memory; the buffer keeps the tensor alive.
Buffer buffer_of(const at::Tensor& contiguous, const char* operation);

/// A flat tensor over a buffer's memory; it keeps the buffer's owner alive.
at::Tensor tensor_of(const Buffer& buffer);

}  // namespace unisono
