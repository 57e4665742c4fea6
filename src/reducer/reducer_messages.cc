// The reducer as its peers see it: which buckets leave when, what the last message says, how a backward ends well or
// not.
#include <ATen/ATen.h>

#include <optional>
#include <utility>

#include "comm/c10d/recorded_group.h"
#include "reducer/reducer.h"
#include "reducer/replica_sample.h"
#include "reducer/sparse_gradients.h"

namespace unisono {

void Reducer::begin_reduction() {
  ExposedTime exposed(timeline_);
  if (order_.wants_rebuild()) rebuild();
  for (Bucket& bucket : buckets_->all()) {
    bucket.pending = 0;
    for (std::size_t member : bucket.spec.members) bucket.pending += order_.expects(member);
    bucket.launched = false;
    bucket.ended = false;
    bucket.work = {};
    bucket.stats = {.bucket = bucket.stats.bucket};
  }
  if (join_.on) {
    if (join_.shadow) message_.joined.set(static_cast<std::size_t>(group_->rank()));
    averaging_.active = join_.by_active && !averaging_.weighted;
    if (averaging_.active) averaging_.weight = join_.shadow ? 0 : 1;
  }
  const bool comparable = !join_.on && (!launcher_.transforms() || transform()->keeps_replicas_equal());
  if (options_.check_replicas && comparable && group_->size() > 1) {
    message_.replicas[static_cast<std::size_t>(group_->rank())] = sample_of_replica(parameters_, step_);
  }
  launcher_.begin(*buckets_, step_, averaging_, overlaps_forward());
}

void Reducer::mark_ready(std::size_t index) {
  if (ready_.test(index)) return;
  ready_.set(index);
  order_.observe(index);
  Bucket* bucket = buckets_->of(index);
  if (bucket == nullptr) return;
  bucket->pending -= order_.expects(index);
  if (bucket->pending <= 0 || bucket->stats.first_ready_ns == 0) {
    bucket->stats.ready_ns = monotonic_ns();
    if (bucket->stats.first_ready_ns == 0) bucket->stats.first_ready_ns = bucket->stats.ready_ns;
  }
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
  if (options_.check_finite && !withhold) note_nonfinite(bucket);
  if (launcher_.transforms()) {
    if (withhold) bucket.flat.zero_();
    give_to_transform();
  } else {
    ControlRecord control;
    if (updates_early()) {
      Bitmap produced(bucket.spec.members.size());
      for (std::size_t i = 0; i < bucket.spec.members.size(); ++i) {
        if (message_.produced.test(bucket.spec.members[i])) produced.set(i);
      }
      control.words = produced.words();
    }
    if (launcher_.next_closes()) {
      const ControlRecord closing = closing_record();
      control.words.insert(control.words.end(), closing.words.begin(), closing.words.end());
    }
    launcher_.launch(control, withhold);
  }
  const BucketStats& stats = bucket.stats;
  if (timeline_.tracing() && stats.first_ready_ns != 0) {
    timeline_.record({"bucket " + std::to_string(stats.bucket), "buckets", stats.first_ready_ns, stats.launched_ns,
                      step_, stats.bucket});
  }
}

void Reducer::give_to_transform() {
  const Bucket& bucket = launcher_.next();
  GradientBucket seen;
  seen.index = bucket.stats.bucket;
  seen.is_last = static_cast<std::size_t>(seen.index) + 1 == buckets_->all().size();
  seen.step = step_;
  seen.buffer = bucket.flat;
  for (std::size_t member : bucket.spec.members) {
    seen.gradients.push_back({slots_[member].name(), slots_[member].place_view()});
    seen.parameters.push_back(slots_[member].parameter());
  }
  launcher_.transform(std::move(seen));
}

ControlRecord Reducer::closing_record() {
  if (options_.strict) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!message_.produced.test(i)) message_.silent.set(i);
    }
  }
  if (!averaging_.weighted && !options_.uneven_accumulation) {
    message_.backwards.set(group_->rank(), join_.shadow ? 0 : accumulated_ + (by_hand_ ? 0 : 1));
  }
  if (group_->rank() == 0 && !by_hand_) message_.observed.set(0);
  ControlRecord record;
  message_.write(record);
  return record;
}

void Reducer::finish_reduction() {
  gradients_end_ns_ = monotonic_ns();
  if (overlaps_forward()) return leave_rest_to_forward();
  complete_reduction();
}

void Reducer::complete_reduction() {
  std::optional<ExposedTime> exposed(timeline_);
  BackwardMessage verdict(group_->size(), slots_.size());
  try {
    while (!launcher_.all_launched()) launch_next(false);
    launcher_.wait(launcher_.transforms() ? closing_record() : ControlRecord{});
    verdict.read(launcher_.verdict(), updates_early() ? (buckets_->all().back().spec.members.size() + 63) / 64 : 0);
    follow_joined(verdict);
    check_verdict(verdict);
    if (launcher_.corrected() && updates_early()) {
      throw Error(
          ErrorCode::invalid_argument,
          "a backward of several weighted losses reached parameters before all weights, so that optimizers have "
          "stepped on "
          "gradients divided by too little; differentiate the losses one by one, or give step_in_backward max_norm");
    }
    if (verdict.late.any()) reduce_late(verdict);
    if (!options_.sparse.empty()) reduce_sparse(verdict);
    settle(verdict);
    if (update_) update_rest(verdict);
  } catch (const Error& e) {
    fail_reduction();
    if (launcher_.failed() < 0) throw;
    throw Error(e.code(), e.what() + describe_bucket(static_cast<std::size_t>(launcher_.failed())));
  } catch (...) {
    fail_reduction();
    throw;
  }
  const bool known = verdict.observed.any();
  by_hand_ ? order_.end_without_backward(known) : order_.end_of_backward(ready_, known);
  exposed.reset();
  std::vector<BucketStats> stats;
  for (const Bucket& bucket : buckets_->all()) stats.push_back(bucket.stats);
  timeline_.end_backward(step_, gradients_end_ns_, std::move(stats));
  close_window();
  ++step_;
  if (phase_ == Phase::reducing) ++synchronisations_;
  if (const auto second = recorded_companion(group_); second && !join_.shadow) second->mark(true);
  transition(Event::end);
  report(verdict);
}

void Reducer::fail_reduction() {
  // What `.grad` holds now differs between ranks, as does where it holds anything.
  for (GradientSlot& slot : slots_) slot.drop();
  order_.forget_observed();
  if (const auto second = recorded_companion(group_)) second->mark(false);
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

void Reducer::reduce_sparse(const BackwardMessage& verdict) {
  std::vector<SparseGradient> gradients;
  std::vector<std::size_t> members;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].is_sparse() || !verdict.produced.test(i)) continue;
    members.push_back(i);
    gradients.push_back({slots_[i].parameter(), slots_[i].give_sparse(message_.produced.test(i), averaging_.weighted)});
  }
  if (members.empty()) return;
  std::size_t bytes = 0;
  const std::vector<at::Tensor> averages = average_sparse(gradients, launcher_.divisor(), *group_, step_, bytes);
  timeline_.count_message(bytes);
  for (std::size_t i = 0; i < members.size(); ++i) slots_[members[i]].accept_sparse(averages[i]);
}

void Reducer::settle(const BackwardMessage& verdict) {
  const bool nothing_to_do = all_views_ && fresh_count_ == slots_.size() && !averaging_.weighted;
  if (!nothing_to_do) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!updated_.test(i)) slots_[i].settle(verdict.produced.test(i));
    }
  }
  if (verdict.late.any()) {
    for (GradientSlot& slot : slots_) slot.reset();
  }
}

void Reducer::close_window() {
  averaging_ = {};
  window_backwards_ = 0;
  accumulated_ = 0;
  opened_.clear();
  message_.clear();
}

void Reducer::abandon(std::int64_t backward) noexcept {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::idle || phase_ == Phase::draining || backward != backward_) return;
  if (phase_ == Phase::reducing) {
    // Peers wait for the rest of this step's messages: they get them, without data and with the reason.
    try {
      message_.abandoned.set(static_cast<std::size_t>(group_->rank()));
      while (!launcher_.all_launched()) launch_next(true);
      launcher_.wait(launcher_.transforms() ? closing_record() : ControlRecord{});
    } catch (...) {  // the group is poisoned: its next call says so
    }
    return fail_reduction();
  }
  averaging_.weight -= backward_weight_;
  if (accumulated_ > 0) --accumulated_;
  remember_versions();
  transition(Event::failure);
}

void Reducer::rebuild() {
  order_.agree(*group_, step_);
  auto plan = this->plan();
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
