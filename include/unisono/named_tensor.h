#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace unisono {

/// A tensor of the model under its module path, e.g. "layers.0.weight".
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace unisono
