#pragma once

#include <ATen/core/Tensor.h>
#include <unisono/distributed_data_parallel.h>

#include <string>
#include <vector>

namespace unisono {

/// Those that are synchronised: without undefined ones and those of the `ignored` names, and each tensor once, under
/// its first name.
std::vector<NamedTensor> synchronised(const std::vector<NamedTensor>& tensors, const std::vector<std::string>& ignored);

/// *Throws* `invalid_argument` for parameters that cannot be averaged (on the meta device, sparse, no leaves, of an
/// unknown type), and where none requires grad, which `frozen` allows.
void require_reducible(const std::vector<NamedTensor>& parameters, bool frozen = false);

/// *Throws* `invalid_argument` naming a parameter that another wrapper has hooks on.
void require_unwrapped(const std::vector<NamedTensor>& parameters);

/// What must stay as it is in a parameter for the reducer's plan and hooks to hold.
struct ParameterMark {
  explicit ParameterMark(const at::Tensor& parameter);
  bool still(const at::Tensor& parameter) const;

  const void* impl;
  at::TensorOptions options;
  bool requires_grad;
};

}  // namespace unisono
