// True denominators: what a weight belongs to, and what a window of weighted backwards may not have done to it.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "reducer/reducer.h"

namespace unisono {

// A weight counts when the backward of its loss runs, not when it is given: a loss may never be differentiated, or
// twice, or after another's backward. The loss's own gradient is there before any parameter's that hangs on this loss
// alone.
at::Tensor Reducer::weight(const at::Tensor& mean_loss, double n) {
  if (!(n >= 0) || std::isinf(n)) {
    throw Error(ErrorCode::invalid_argument,
                "weight(loss, n): n is " + std::to_string(n) + "; it is the number of samples the loss is the mean of");
  }
  at::Tensor loss = mean_loss * n;
  if (loss.requires_grad()) {
    loss.register_hook([reducer = std::weak_ptr<Reducer*>(alive_), n](const at::Tensor&) {
      auto alive = reducer.lock();
      if (!alive) return;
      try {
        (*alive)->weigh(n);
      } catch (const Error& error) {
        (*alive)->leaving(error);
        throw;
      }
    });
  }
  return loss;
}

void Reducer::weigh(double n) {
  std::lock_guard lock(mutex_);
  drain();
  const BackwardContext context = current_backward();
  if (phase_ != Phase::idle && context.depth >= ending_depth_ && context.id <= newest_id_) {
    // The backward of a sum of losses has begun already.
    if (!averaging_.weighted) refuse_mixed_weights();
    averaging_.weight += n;
    if (phase_ == Phase::reducing) launcher_.add_weight(n);
    backward_weight_ += n;
    void_ = backward_weight_ == 0;
    return;
  }
  if (!pending_weight_) {
    pending_weight_ = 0;
    const std::int64_t pending = ++pending_id_;
    // Gone when this backward has ended without reaching a parameter, by an exception or because it was an
    // autograd::grad.
    std::shared_ptr<void> gone(nullptr, [reducer = std::weak_ptr<Reducer*>(alive_), pending](void*) {
      if (auto alive = reducer.lock()) (*alive)->forget_pending_weight(pending);
    });
    at_end_of_backward([gone] {});
  }
  *pending_weight_ += n;
}

void Reducer::forget_pending_weight(std::int64_t pending) {
  std::lock_guard lock(mutex_);
  if (pending == pending_id_) pending_weight_.reset();
}

void Reducer::refuse_mixed_weights() const {
  throw Error(ErrorCode::invalid_argument,
              "step " + std::to_string(step_) +
                  " has backwards (or losses of one backward) with a weight and without; wrap every "
                  "micro-batch's loss in weight(loss, n), or none");
}

void Reducer::commit_weight() {
  if (window_backwards_ > 0) watch_window();
  if (window_backwards_ > 0 && averaging_.weighted != pending_weight_.has_value()) refuse_mixed_weights();
  backward_weight_ = pending_weight_.value_or(0);
  averaging_.weighted = pending_weight_.has_value();
  averaging_.weight += backward_weight_;
  void_ = averaging_.weighted && backward_weight_ == 0;
  pending_weight_.reset();
}

// Between two backwards of a window the user may have cleared the gradients: then the window begins anew.
void Reducer::watch_window() {
  const auto has_gradient = [](const GradientSlot& slot) { return slot.has_gradient(); };
  if (std::none_of(slots_.begin(), slots_.end(), has_gradient)) {
    for (GradientSlot& slot : slots_) slot.reset();
    return close_window();
  }
  if (!averaging_.weighted) return;
  // What was there before a weighted window is set aside and other on each rank, so that an edit of `.grad` inside it
  // would mean something else on each rank.
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (window_versions_[i] == slots_[i].version()) continue;
    throw Error(
        ErrorCode::invalid_argument,
        "the gradient of parameter '" + slots_[i].name() +
            "' was changed between two backwards of a step with weights; "
            "change gradients after the synchronisation, or clear all of them (to None) to begin the step anew");
  }
}

void Reducer::remember_versions() {
  if (!averaging_.weighted) return;
  window_versions_.resize(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) window_versions_[i] = slots_[i].version();
}

}  // namespace unisono
