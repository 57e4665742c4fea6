// Ranks with fewer inputs than others: how those without take part.
#include <ATen/ATen.h>

#include "reducer/reducer.h"

namespace unisono {

void Reducer::begin_join(bool by_active, bool end_early) {
  std::lock_guard lock(mutex_);
  drain();
  if (join_.on) throw Error(ErrorCode::invalid_argument, "join() inside join()");
  if (is_accumulating()) {
    throw Error(ErrorCode::invalid_argument, "join() while gradients are being accumulated; begin it before a step");
  }
  join_ = {.on = true, .by_active = by_active, .end_early = end_early};
}

void Reducer::end_join() {
  std::lock_guard lock(mutex_);
  join_ = {};
  authority_ = 0;
}

void Reducer::continue_join(const Reducer& before) {
  join_ = before.join_;
  authority_ = before.authority_;
  all_joined_ = before.all_joined_;
}

// The others' messages are known in advance: the plan, in its order, then what the verdict asks for. So a rank without
// inputs sends the same messages with nothing in them, and nobody has to ask before a step who still takes part.
bool Reducer::shadow_step() {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> own;
  for (const at::Tensor& p : parameters_) {
    at::Tensor& grad = p.mutable_grad();
    own.push_back(grad.defined() && grad.layout() == at::kStrided ? grad.clone() : grad);
    grad.reset();
  }
  join_.shadow = true;
  averaging_ = {.weighted = join_.weighted};
  reduce_by_hand();
  for (std::size_t i = 0; i < own.size(); ++i) parameters_[i].mutable_grad() = own[i];
  return !all_joined_;
}

void Reducer::follow_joined(const BackwardMessage& verdict) {
  if (!join_.on) return;
  int lowest = -1;
  for (int r = group_->size() - 1; r >= 0; --r) {
    if (!verdict.joined.test(static_cast<std::size_t>(r))) lowest = r;
  }
  all_joined_ = lowest < 0;
  if (lowest >= 0) authority_ = lowest;
  join_.weighted = averaging_.weighted;
  if (!join_.end_early || !verdict.joined.any() || all_joined_) return;
  throw Error(ErrorCode::mismatch, "rank " + verdict.joined.list() + " has no more inputs in step " +
                                       std::to_string(step_) +
                                       ", and join was asked to end there (throw_on_early_termination)");
}

}  // namespace unisono
