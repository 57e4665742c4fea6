#pragma once

#include <ATen/ATen.h>
#include <unisono/gradient_transform.h>

#include <map>
#include <string>

namespace unisono {

/// What compression lost of each parameter's gradient, to be added in the next step. By name, for buckets are rebuilt.
class ErrorMemory {
 public:
  /// Adds what is remembered to the gradient, unless it is of another parameter that had the name.
  void add_to(const NamedTensor& gradient) const {
    const auto found = errors_.find(gradient.name);
    if (found != errors_.end() && found->second.sizes() == gradient.tensor.sizes()) gradient.tensor.add_(found->second);
  }
  void remember(const std::string& name, const at::Tensor& lost) { errors_[name] = lost; }
  const std::map<std::string, at::Tensor>& all() const { return errors_; }

 private:
  std::map<std::string, at::Tensor> errors_;
};

}  // namespace unisono
