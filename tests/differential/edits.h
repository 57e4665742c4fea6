#pragma once

#include <torch/torch.h>

#include <vector>

#include "differential/program.h"

namespace unisono::differential {

/// What users do to `.grad` and to parameters; the same on ranks and in the reference.
inline void apply_edit(const Action& action, std::vector<at::Tensor>& parameters) {
  at::NoGradGuard no_grad;
  if (action.edit == Edit::zero_to_none || action.edit == Edit::zero_in_place) {
    for (at::Tensor& p : parameters) {
      if (action.edit == Edit::zero_to_none) {
        p.mutable_grad().reset();
      } else if (p.grad().defined()) {
        p.mutable_grad().zero_();
      }
    }
    return;
  }
  at::Tensor& p = parameters[static_cast<std::size_t>(action.parameter)];
  at::Tensor& grad = p.mutable_grad();
  if (!grad.defined() || !p.requires_grad()) return;
  if (action.edit == Edit::clear) grad.reset();
  if (action.edit == Edit::scale) grad.mul_(0.5);
  if (action.edit == Edit::replace) {
    Draw draw(action.seed);
    at::Tensor fresh = at::empty_like(grad);
    fill(fresh, draw, 1);
    grad = fresh;
  }
  if (action.edit == Edit::relayout) {
    grad =
        grad.dim() == 2 ? grad.t().clone(at::MemoryFormat::Contiguous).t() : grad.clone(at::MemoryFormat::Contiguous);
  }
}

}  // namespace unisono::differential
