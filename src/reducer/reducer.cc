#include "reducer/reducer.h"

#include <cmath>
#include <optional>
#include <utility>

#include <ATen/ATen.h>

namespace unisono {

/// Waits at the end of one backward. Autograd destroys it without running it when that backward throws, and does so
/// before the exception reaches the caller: that is how a backward that was abandoned is noticed.
class Reducer::Ending {
 public:
  Ending(std::weak_ptr<Reducer*> reducer, std::int64_t backward, int depth)
      : reducer_(std::move(reducer)), backward_(backward), depth_(depth) {}
  ~Ending() {
    if (reached_) return;
    if (auto reducer = reducer_.lock()) (*reducer)->abandon(backward_);
  }
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

  void reach() {
    reached_ = true;
    auto reducer = reducer_.lock();
    if (!reducer) return;
    try {
      (*reducer)->reached_end(backward_, depth_);
    } catch (const Error& error) {
      (*reducer)->leaving(error);
      throw;
    }
  }

 private:
  std::weak_ptr<Reducer*> reducer_;
  std::int64_t backward_;
  int depth_;
  bool reached_ = false;
};

Reducer::Reducer(const std::vector<NamedTensor>& parameters, std::shared_ptr<ProcessGroup> group,
                 const Options& options)
    : group_(std::move(group)),
      options_(options),
      order_(parameters.size()),
      launcher_(*group_, timeline_),
      ready_(parameters.size()),
      fresh_(parameters.size()),
      message_(group_->size(), parameters.size()),
      opened_(parameters.size()),
      alive_(std::make_shared<Reducer*>(this)) {
  std::vector<GradientSpec> specs;
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& p : parameters) {
    slots_.emplace_back(p.name, p.tensor, options_.as_view);
    specs.push_back(slots_.back().spec());
    tensors.push_back(p.tensor);
  }
  buckets_ = std::make_unique<Buckets>(plan_buckets(specs, order_.order(), options_.caps), slots_, *group_);
  hooks_ = std::make_unique<AutogradHooks>(tensors, *this);
}

Reducer::~Reducer() {
  hooks_.reset();
  alive_.reset();
}

void Reducer::leaving(const Error& error) {
  if (options_.rethrow) options_.rethrow(error);
}

void Reducer::transition(Event event) {
  if (event == Event::first_hook && phase_ == Phase::idle) {
    phase_ = sync_ ? Phase::reducing : Phase::local;
  } else if (event != Event::first_hook && phase_ != Phase::idle) {
    phase_ = Phase::idle;
    watch_.reset();
    order_.forget_walk();
  } else {
    throw Error(ErrorCode::internal, "the reducer's phase does not allow what happened; please report this");
  }
}

// ---- Following autograd -------------------------------------------------------------------------------------------

at::Tensor Reducer::before_accumulate(std::size_t index, const at::Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  std::lock_guard lock(mutex_);
  enter();
  GradientSlot& slot = slots_[index];
  message_.produced.set(index);
  const bool late = phase_ == Phase::reducing && buckets_->of(index).launched;
  const at::Tensor& used = void_ ? at::zeros_like(gradient) : gradient;
  if (late) {
    message_.late.set(index);
    slot.begin_late();
    return used;
  }
  if (!fresh_.test(index)) {
    fresh_.set(index);
    ++fresh_count_;
  }
  if (averaging_.weighted && !opened_.test(index)) {
    opened_.set(index);
    return slot.take_setting_aside(used);
  }
  // A user's hook wants to see `.grad` once it is accumulated: let autograd accumulate.
  if (has_post_accumulate_hook(slot.parameter())) return used;
  return slot.take(used);
}

void Reducer::after_accumulate(std::size_t index) {
  std::lock_guard lock(mutex_);
  enter();
  const std::int64_t begin = timeline_.tracing() ? monotonic_ns() : 0;
  GradientSlot& slot = slots_[index];
  if (slot.is_late()) {
    slot.end_late();
  } else {
    if (fresh_.test(index) && (options_.as_view || phase_ == Phase::reducing)) slot.taken();
    if (phase_ == Phase::reducing) mark_ready(index);
  }
  if (timeline_.tracing()) timeline_.record({slot.name(), "hooks", begin, monotonic_ns(), step_, -1});
}

void Reducer::enter() {
  const BackwardContext context = current_backward();
  if (phase_ != Phase::idle && context.depth < ending_depth_) {
    // Either the backward around the nested one that was followed so far, or, with a newer id, another backward: then the
    // outer one was abandoned without a word.
    if (context.id < newest_id_) {
      queue_end(context);
    } else {
      mutex_.unlock();
      abandon(backward_);
      mutex_.lock();
    }
  }
  if (phase_ == Phase::idle) arm(context);
  newest_id_ = std::max(newest_id_, context.id);
}

void Reducer::arm(const BackwardContext& context) {
  check_weight();
  begin_backward();
  transition(Event::first_hook);
  try {
    newest_id_ = context.id;
    queue_end(context);
    if (phase_ == Phase::reducing) begin_reduction();
  } catch (...) {
    if (phase_ != Phase::idle) transition(Event::failure);
    throw;
  }
}

void Reducer::queue_end(const BackwardContext& context) {
  ending_depth_ = context.depth;
  auto ending = std::make_shared<Ending>(alive_, backward_, context.depth);
  at_end_of_backward([ending] { ending->reach(); });
}

void Reducer::reached_end(std::int64_t backward, int depth) {
  std::unique_lock lock(mutex_);
  if (phase_ == Phase::idle || backward != backward_ || depth > ending_depth_) return;
  if (depth == 0) {
    if (phase_ == Phase::reducing) return finish_reduction();
    transition(Event::end);
    return;
  }
  watch_ = watch_outer_backward(depth, [this] {
    std::lock_guard inner(mutex_);
    const BackwardContext context = current_backward();
    if (phase_ != Phase::idle && context.id < newest_id_) queue_end(context);
  });
}

void Reducer::begin_backward() {
  ++backward_;
  ++window_backwards_;
  ready_.clear();
  fresh_.clear();
  fresh_count_ = 0;
  timeline_.begin_backward();
}

// ---- Reducing -----------------------------------------------------------------------------------------------------

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

// ---- What the user calls ------------------------------------------------------------------------------------------

at::Tensor Reducer::weight(const at::Tensor& mean_loss, double n) {
  if (!(n >= 0) || std::isinf(n)) {
    throw Error(ErrorCode::invalid_argument,
                "weight(loss, n): n is " + std::to_string(n) + "; it is the number of samples the loss is the mean of");
  }
  std::lock_guard lock(mutex_);
  if (window_backwards_ > 0 && !averaging_.weighted) {
    throw Error(ErrorCode::invalid_argument,
                "weight(loss, n) is called after a backward without a weight has accumulated gradients; give every "
                "micro-batch of a step its weight, or none");
  }
  averaging_.weighted = true;
  averaging_.weight += n;
  unused_weight_ += n;
  has_unused_weight_ = true;
  return mean_loss * n;
}

void Reducer::check_weight() {
  if (averaging_.weighted && !has_unused_weight_) {
    throw Error(ErrorCode::invalid_argument,
                "this backward has no weight although an earlier one of the same step had; wrap every micro-batch's loss "
                "in weight(loss, n), or none");
  }
  void_ = averaging_.weighted && unused_weight_ == 0;
  unused_weight_ = 0;
  has_unused_weight_ = false;
}

void Reducer::expect_backward_from(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  if (!sync_) return;
  order_.expect(hooks_->reached_from(outputs));
}

void Reducer::sync_grads() {
  std::lock_guard lock(mutex_);
  if (phase_ != Phase::idle) {
    throw Error(ErrorCode::invalid_argument, "sync_grads() inside a backward; call it after backward has returned");
  }
  begin_backward();
  phase_ = Phase::reducing;
  try {
    begin_reduction();
  } catch (...) {
    transition(Event::failure);
    throw;
  }
  finish_reduction();
}

std::vector<std::int64_t> Reducer::bucket_sizes() const {
  std::vector<std::int64_t> sizes;
  for (const Bucket& bucket : buckets_->all()) sizes.push_back(static_cast<std::int64_t>(bucket.spec.bytes));
  return sizes;
}

std::string Reducer::describe_bucket(std::size_t index) const {
  const auto& members = buckets_->all()[index].spec.members;
  std::string text = " Bucket " + std::to_string(index) + " holds '" + slots_[members.front()].name() + "'";
  if (members.size() > 1) {
    text += " to '" + slots_[members.back()].name() + "' (" + std::to_string(members.size()) + " parameters)";
  }
  return text + ".";
}

std::string Reducer::names_of(const Bitmap& set) const {
  std::string names;
  int count = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!set.test(i)) continue;
    if (++count <= 8) names += (names.empty() ? "'" : ", '") + slots_[i].name() + "'";
  }
  if (count > 8) names += " and " + std::to_string(count - 8) + " more";
  return names;
}

}  // namespace unisono
