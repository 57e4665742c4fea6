// Optimizer steps inside backward, and beyond it.
#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "reducer/reducer.h"

namespace unisono {

void Reducer::bucket_ended(std::size_t index) {
  if (!updates_early()) return;
  const Bucket& bucket = buckets_->all()[index];
  if (bucket.work.withheld()) return;  // a rank abandoned this backward
  const auto& produced = bucket.work.control().words;
  std::vector<NamedTensor> ready;
  for (std::size_t i = 0; i < bucket.spec.members.size(); ++i) {
    if ((produced[i / 64] >> i % 64 & 1) == 0) continue;
    const std::size_t member = bucket.spec.members[i];
    slots_[member].settle(true);
    updated_.set(member);
    ready.push_back({slots_[member].name(), slots_[member].parameter()});
  }
  if (!ready.empty()) update_(ready);
}

// Two phases where one bucket's step depends on all others: first every gradient is averaged, then all are used.
void Reducer::update_rest(const BackwardMessage& verdict) {
  at::NoGradGuard no_grad;
  std::vector<NamedTensor> ready;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!verdict.produced.test(i) || updated_.test(i)) continue;
    updated_.set(i);
    ready.push_back({slots_[i].name(), slots_[i].parameter()});
  }
  if (update_options_.max_norm) {
    double square = 0;
    for (const NamedTensor& p : ready) {
      const double norm = p.tensor.grad().norm().to(at::kDouble).item<double>();
      square += norm * norm;
    }
    const double factor = *update_options_.max_norm / (std::sqrt(square) + 1e-6);
    if (factor < 1) {
      for (const NamedTensor& p : ready) p.tensor.grad().mul_(factor);
    }
  }
  if (!ready.empty()) update_(ready);
}

void Reducer::require_overlappable(const StepInBackwardOptions& options, bool transforms) const {
  if (!options.overlap_forward) return;
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorCode::invalid_argument,
                "overlap_forward takes each bucket's step when its layer is used next, and " + what);
  };
  if (options.max_norm) refuse("max_norm needs the gradients of all of them first; use one or the other");
  if (transforms) refuse("a gradient transform averages them at the end of the backward; use one or the other");
  for (const GradientSlot& slot : slots_) {
    if (slot.is_sparse())
      refuse("the sparse gradient of '" + slot.name() + "' is averaged by a message of its own at the end");
  }
}

// Everything has left and nothing is waited for. Nobody may see gradients that still move: they count as used up
// already.
void Reducer::leave_rest_to_forward() {
  {
    ExposedTime exposed(timeline_);
    try {
      while (!launcher_.all_launched()) launch_next(false);
      if (update_options_.steps_left) update_options_.steps_left(true);
    } catch (...) {
      fail_reduction();
      throw;
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (message_.produced.test(i) && !updated_.test(i)) slots_[i].parameter().mutable_grad().reset();
    }
  }
  ++synchronisations_;
  transition(Event::leave_rest);
  rest_.state.emplace();
  std::vector<at::Tensor> watched = parameters_;
  for (const Bucket& bucket : buckets_->all()) watched.push_back(bucket.flat);
  rest_.watch = std::make_unique<TensorWatch>(watched, [this](std::size_t i) { used(i); });
}

void Reducer::used(std::size_t watched) {
  std::lock_guard lock(mutex_);
  if (phase_ != Phase::draining) return;
  const at::ThreadLocalStateGuard as_in_backward(*rest_.state);
  try {
    ExposedTime exposed(timeline_);
    if (watched >= slots_.size()) return complete_reduction();
    launcher_.wait_for(*buckets_->of(watched));
    if (!launcher_.outstanding()) complete_reduction();
  } catch (...) {
    rest_.error = std::current_exception();
    try {  // the other messages are under way and must be waited for; what else fails has the same cause
      if (phase_ == Phase::draining) complete_reduction();
    } catch (...) {
    }
  }
}

void Reducer::drain() {
  if (phase_ == Phase::draining) {
    rest_.watch.reset();
    const at::ThreadLocalStateGuard as_in_backward(*rest_.state);
    complete_reduction();
  }
  raise_late_error();
}

void Reducer::raise_late_error() {
  if (rest_.error) std::rethrow_exception(std::exchange(rest_.error, nullptr));
}

void Reducer::finish_step() {
  std::lock_guard lock(mutex_);
  drain();
}

void Reducer::check_step() {
  std::lock_guard lock(mutex_);
  raise_late_error();
}

}  // namespace unisono
