#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace example {

/// AdamW in one pass over all parameters (ATen's fused kernel), where torch::optim::AdamW makes about ten small
/// operations for each of them. Matrices decay, vectors (biases, LayerNorm) do not.
class AdamW {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.99, eps = 1e-8, weight_decay = 0.1;
  };

  AdamW(const std::vector<at::Tensor>& parameters, Options options) : options_(options) {
    for (const auto& p : parameters) {
      Group& group = groups_[p.dim() >= 2 ? 0 : 1];
      group.parameters.push_back(p);
      group.first.push_back(at::zeros_like(p));
      group.second.push_back(at::zeros_like(p));
      group.steps.push_back(at::zeros({}, at::kFloat));
    }
  }

  void step(double lr) {
    at::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) {
      Group& group = groups_[i];
      std::vector<at::Tensor> gradients;
      for (const auto& p : group.parameters) gradients.push_back(p.grad());
      at::_foreach_add_(group.steps, 1);
      at::_fused_adamw_(group.parameters, gradients, group.first, group.second, {}, group.steps, lr, options_.beta1,
                        options_.beta2, i == 0 ? options_.weight_decay : 0.0, options_.eps, /*amsgrad=*/false,
                        /*maximize=*/false);
    }
  }

  void zero_grad() {
    for (auto& group : groups_)
      for (auto& p : group.parameters) p.mutable_grad().reset();
  }

 private:
  struct Group {
    std::vector<at::Tensor> parameters, first, second, steps;
  };
  Group groups_[2];
  Options options_;
};

}  // namespace example
