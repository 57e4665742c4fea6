// The reducer as autograd sees it: which backward a hook belongs to, where a gradient goes, when a backward has ended.
#include <ATen/ATen.h>

#include <algorithm>

#include "reducer/reducer.h"

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

at::Tensor Reducer::before_accumulate(std::size_t index, const at::Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  std::lock_guard lock(mutex_);
  enter();
  GradientSlot& slot = slots_[index];
  message_.produced.set(index);
  const Bucket* bucket = buckets_->of(index);
  const bool late = phase_ == Phase::reducing && bucket != nullptr && bucket->launched;
  const at::Tensor& used = void_ ? at::zeros_like(gradient) : gradient;
  if (late) {
    if (updates_early()) {
      throw Error(
          ErrorCode::invalid_argument,
          "a gradient of parameter '" + slot.name() + "' came in step " + std::to_string(step_) +
              " after its bucket had been averaged and its optimizer had stepped: it is used several times in one "
              "backward. Give the optimizer max_norm (infinity clips nothing), so that it steps at the end.");
    }
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
    ready_.set(index);  // the next backward waits for it again
  } else {
    if (fresh_.test(index) && (options_.as_view || phase_ == Phase::reducing)) slot.taken();
    if (fresh_.test(index) && !slot.has_gradient()) {  // a post-accumulate hook of the user's has taken it away
      fresh_.clear(index);
      --fresh_count_;
      message_.produced.clear(index);
    }
    if (phase_ == Phase::reducing) mark_ready(index);
  }
  if (timeline_.tracing()) timeline_.record({slot.name(), "hooks", begin, monotonic_ns(), step_, -1});
}

void Reducer::enter() {
  drain();
  const BackwardContext context = current_backward();
  if (phase_ != Phase::idle && context.depth < ending_depth_) {
    // Either the backward around the nested one that was followed so far, or, with a newer id, another backward: then
    // the outer one was abandoned without a word.
    if (context.id < newest_id_) {
      queue_end(context);
    } else {
      mutex_.unlock();
      abandon(backward_);
      mutex_.lock();
    }
  }
  if (phase_ == Phase::idle) {
    arm(context);
    newest_id_ = std::max(newest_id_, context.id);
    return check_frozen();
  }
  newest_id_ = std::max(newest_id_, context.id);
}

void Reducer::arm(const BackwardContext& context) {
  commit_weight();
  begin_backward();
  transition(Event::first_hook);
  if (phase_ == Phase::local) ++accumulated_;
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
  if (phase_ == Phase::idle || phase_ == Phase::draining || backward != backward_ || depth > ending_depth_) return;
  if (depth == 0) {
    if (phase_ == Phase::reducing) return finish_reduction();
    remember_versions();
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
  by_hand_ = false;
  updated_.clear();
  timeline_.begin_backward();
}

}  // namespace unisono
