#pragma once

#include <ATen/core/Tensor.h>
#include <unisono/buffer.h>

#include <string>

namespace unisono {

/// How elements of a torch dtype travel: complex numbers as two reals.
struct WireType {
  Dtype dtype;
  int parts = 1;  ///< wire elements per torch element
};

/// *Throws* `invalid_argument` naming `what` when the dtype cannot be reduced.
WireType wire_type(at::ScalarType type, const std::string& what);

Device place_of(const at::Tensor& tensor);

}  // namespace unisono
