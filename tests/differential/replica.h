#pragma once

#include <memory>
#include <vector>

#include "differential/case.h"

namespace unisono::differential {

/// One rank's model in the reference: plain autograd, and what fires when.
struct Replica {
  Replica(const Case& c, std::size_t rank);

  at::Tensor loss(const Micro& micro, const Call& call);
  /// Accumulates the gradients of `loss` into `.grad`. With weights the loss is taken `n` times, what gradients hold
  /// before the window is set aside, and n = 0 gives zeros whatever the loss computes.
  void backward(const Micro& micro, const at::Tensor& loss, bool retain);
  void close_window();
  std::size_t size() const { return parameters.size(); }

  std::size_t rank;
  std::shared_ptr<RandomModel> model;
  std::vector<at::Tensor> parameters;
  torch::optim::SGD sgd;

  // Of the last backward.
  std::vector<int> fires;

  // Of the window.
  std::vector<bool> produced;
  std::vector<bool> opened;  // in a weighted window
  std::vector<at::Tensor> aside;
  std::vector<double> magnitude;  // sum of the largest elements of what was accumulated
  double weight = 0;
  bool weighted = false;

  std::vector<int> silent_for;  // synchronisations since the parameter last fired

 private:
  at::Tensor on_gradient(std::size_t index, const at::Tensor& gradient);
  bool listening_ = false;
  bool void_ = false;
};

}  // namespace unisono::differential
