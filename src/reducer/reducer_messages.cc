// The reducer as its peers see it: which buckets leave when, what the last message says, how a backward ends well or not.
#include <optional>
#include <utility>

#include <ATen/ATen.h>

#include "reducer/reducer.h"

namespace unisono {

void Reducer::begin_reduction() {
  ExposedTime exposed(timeline_);
  if (order_.wants_rebuild()) rebuild();
  for (Bucket& bucket : buckets_->all()) {
    bucket.pending = 0;
    for (std::size_t member : bucket.spec.members) bucket.pending += order_.expects(member);
    bucket.launched = false;
    bucket.work = {};
    bucket.first_ready_ns = 0;
  }
  launcher_.begin(*buckets_, step_, averaging_);
}

void Reducer::mark_ready(std::size_t index) {
  if (ready_.test(index)) return;
  ready_.set(index);
  order_.observe(index);
  Bucket& bucket = buckets_->of(index);
  bucket.pending -= order_.expects(index);
  if (timeline_.tracing() && bucket.first_ready_ns == 0) bucket.first_ready_ns = monotonic_ns();
  if (!options_.overlap || (!launcher_.next_is_ready() && !launcher_.outstanding())) return;
  ExposedTime exposed(timeline_);
  while (launcher_.next_is_ready()) launch_next(false);
  launcher_.poll();
}

void Reducer::launch_next(bool withhold) {
  Bucket& bucket = launcher_.next();
  if (!withhold) {
    for (std::size_t member : bucket.spec.members) {
      if (fresh_.test(member)) continue;
      if (message_.produced.test(member) && slots_[member].has_gradient()) {
        slots_[member].fill_accumulated();
      } else {
        message_.produced.clear(member);
        slots_[member].fill_silent(averaging_.weighted);
      }
    }
  }
  ControlRecord control;
  if (launcher_.next_is_last()) {
    if (options_.strict) {
      for (std::size_t i = 0; i < slots_.size(); ++i) {
        if (!message_.produced.test(i)) message_.silent.set(i);
      }
    }
    message_.write(control);
  }
  const std::size_t index = buckets_->index_of(bucket.spec.members.front());
  launcher_.launch(control, withhold);
  if (timeline_.tracing() && bucket.first_ready_ns != 0) {
    timeline_.record({"bucket " + std::to_string(index), "buckets", bucket.first_ready_ns, bucket.launched_ns, step_,
                      static_cast<int>(index)});
  }
}

void Reducer::finish_reduction() {
  const std::int64_t begin = monotonic_ns();
  std::optional<ExposedTime> exposed(timeline_);
  BackwardMessage verdict(group_->size(), slots_.size());
  try {
    while (!launcher_.all_launched()) launch_next(false);
    launcher_.wait();
    verdict.read(launcher_.verdict());
    if (verdict.abandoned.any()) {
      std::string ranks;
      for (int r = 0; r < group_->size(); ++r) {
        if (verdict.abandoned.test(static_cast<std::size_t>(r))) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
      }
      throw Error(ErrorCode::mismatch,
                  "rank " + ranks + " threw in its backward of step " + std::to_string(step_) + "; rank " +
                      std::to_string(group_->rank()) +
                      " has no averaged gradients for this step. See the error of that rank; call zero_grad() and run the "
                      "step again on all ranks, or stop.");
    }
    if (verdict.late.any()) reduce_late(verdict);
    settle(verdict);
  } catch (const Error& e) {
    fail_reduction();
    if (launcher_.failed() < 0) throw;
    throw Error(e.code(), e.what() + describe_bucket(static_cast<std::size_t>(launcher_.failed())));
  } catch (...) {
    fail_reduction();
    throw;
  }
  order_.end_of_backward(ready_);
  exposed.reset();
  timeline_.end_backward(step_, monotonic_ns() - begin);
  close_window();
  ++step_;
  ++synchronisations_;
  transition(Event::end);
  if (options_.strict && verdict.silent.any()) {
    throw Error(ErrorCode::invalid_argument, "strict: no gradient reached " + names_of(verdict.silent) +
                                                 " on at least one rank in step " + std::to_string(step_ - 1) +
                                                 "; the averages are right, and without `strict` this is no error");
  }
}

void Reducer::fail_reduction() {
  for (GradientSlot& slot : slots_) slot.reset();
  order_.forget_observed();
  close_window();
  ++step_;
  transition(Event::failure);
}

// Gradients that came after their bucket had left are averaged in a message of their own and added: right for sums and
// means alike, and nobody had to wait. All ranks know from the verdict which buckets and parameters are concerned.
void Reducer::reduce_late(const BackwardMessage& verdict) {
  at::NoGradGuard no_grad;
  auto& buckets = buckets_->all();
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    std::vector<std::size_t> late;
    std::int64_t count = 0;
    for (std::size_t member : buckets[b].spec.members) {
      if (!verdict.late.test(member)) continue;
      late.push_back(member);
      count += slots_[member].flat_view().numel();
    }
    if (late.empty()) continue;
    at::Tensor flat = at::zeros({count}, slots_[late.front()].flat_view().options());
    std::int64_t at = 0;
    for (std::size_t member : late) {
      const std::int64_t n = slots_[member].flat_view().numel();
      if (slots_[member].has_delta()) slots_[member].write_delta(flat.narrow(0, at, n));
      at += n;
    }
    launcher_.average(flat, static_cast<std::int32_t>(b));
    at = 0;
    for (std::size_t member : late) {
      const std::int64_t n = slots_[member].flat_view().numel();
      slots_[member].add_delta(flat.narrow(0, at, n));
      at += n;
    }
  }
}

void Reducer::settle(const BackwardMessage& verdict) {
  const bool nothing_to_do = options_.as_view && fresh_count_ == slots_.size() && !averaging_.weighted;
  if (!nothing_to_do) {
    for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].settle(verdict.produced.test(i));
  }
  if (verdict.late.any()) {
    for (GradientSlot& slot : slots_) slot.reset();
  }
}

void Reducer::close_window() {
  averaging_ = {};
  window_backwards_ = 0;
  opened_.clear();
  for (Bitmap* map : {&message_.abandoned, &message_.produced, &message_.late, &message_.silent}) map->clear();
}

void Reducer::abandon(std::int64_t backward) noexcept {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::idle || backward != backward_) return;
  if (phase_ == Phase::reducing) {
    // Peers wait for the rest of this step's messages: they get them, without data and with the reason.
    try {
      message_.abandoned.set(static_cast<std::size_t>(group_->rank()));
      while (!launcher_.all_launched()) launch_next(true);
      launcher_.wait();
    } catch (...) {  // the group is poisoned: its next call says so
    }
    return fail_reduction();
  }
  transition(Event::failure);
}

void Reducer::rebuild() {
  order_.agree(*group_, step_);
  std::vector<GradientSpec> specs;
  for (const GradientSlot& slot : slots_) specs.push_back(slot.spec());
  auto plan = plan_buckets(specs, order_.order(), options_.caps);
  bool same = plan.size() == buckets_->all().size();
  for (std::size_t b = 0; same && b < plan.size(); ++b) same = plan[b].members == buckets_->all()[b].spec.members;
  if (same) return;
  bool holds_gradients = false;
  for (const GradientSlot& slot : slots_) holds_gradients |= slot.has_gradient();
  if (!holds_gradients) {  // give the old memory back before the new is taken
    for (GradientSlot& slot : slots_) slot.unplace();
    buckets_.reset();
  }
  buckets_ = std::make_unique<Buckets>(std::move(plan), slots_, *group_);
  timeline_.count_rebuild();
}

}  // namespace unisono
