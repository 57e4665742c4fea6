#pragma once

#include <unisono/named_tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace unisono::python {

/// Named tensors as Python gives them: `list(module.named_parameters())`.
using Named = std::vector<std::pair<std::string, at::Tensor>>;

inline std::vector<NamedTensor> named(const Named& tensors) {
  std::vector<NamedTensor> out;
  out.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) out.push_back({name, tensor});
  return out;
}

}  // namespace unisono::python
