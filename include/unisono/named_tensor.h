#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace unisono {

/// A tensor of the model under its module path, e.g. "layers.0.weight".
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace unisono
