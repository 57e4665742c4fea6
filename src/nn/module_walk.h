#pragma once

#include <torch/nn/module.h>
#include <unisono/named_tensor.h>

#include <string>
#include <vector>

namespace unisono {

/// Stands for which parameters a module holds, in order; another value when one was added, removed or replaced.
std::size_t parameters_key(const torch::nn::Module& module);

/// Names of the parameters of embedding layers whose gradients are sparse.
std::vector<std::string> sparse_parameters_of(const torch::nn::Module& module);

}  // namespace unisono
