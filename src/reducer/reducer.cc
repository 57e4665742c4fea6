#include "reducer/reducer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace unisono {

Reducer::Reducer(const std::vector<NamedTensor>& parameters, std::shared_ptr<ProcessGroup> group,
                 const Options& options)
    : group_(std::move(group)),
      options_(options),
      order_(parameters.size()),
      launcher_(*group_, timeline_, options.user),
      ready_(parameters.size()),
      fresh_(parameters.size()),
      updated_(parameters.size()),
      message_(group_->size(), parameters.size()),
      opened_(parameters.size()),
      step_(options.first_step),
      alive_(std::make_shared<Reducer*>(this)) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const bool sparse = i < options_.sparse.size() && options_.sparse[i];
    slots_.emplace_back(parameters[i].name, parameters[i].tensor, options_.as_view, sparse, options_.travels_as);
    parameters_.push_back(parameters[i].tensor);
    all_views_ = all_views_ && slots_.back().as_view();
  }
  launcher_.on_ended = [this](std::size_t bucket) { bucket_ended(bucket); };
  buckets_ = std::make_unique<Buckets>(plan(), slots_, *group_);
  hooks_ = std::make_unique<AutogradHooks>(parameters_, *this);
}

Reducer::~Reducer() {
  try {
    finish_step();
  } catch (...) {  // there is nobody left to tell
  }
  hooks_.reset();
  alive_.reset();
}

std::vector<BucketSpec> Reducer::plan() const {
  std::vector<GradientSpec> specs;
  for (const GradientSlot& slot : slots_) specs.push_back(slot.spec());
  std::vector<std::size_t> order, late;
  for (std::size_t i : order_.order()) {
    if (slots_[i].is_sparse()) continue;
    (i < options_.delayed.size() && options_.delayed[i] ? late : order).push_back(i);
  }
  std::vector<BucketSpec> plan = plan_buckets(specs, order, options_.caps);
  for (BucketSpec& bucket : plan_buckets(specs, late, options_.caps)) plan.push_back(std::move(bucket));
  if (plan.empty()) plan.push_back({.bytes = kAlignment});  // all are sparse: the last message is still needed
  return plan;
}

bool Reducer::has_unsynchronised() const {
  if (window_backwards_ == 0 || phase_ == Phase::draining) return false;
  return std::any_of(slots_.begin(), slots_.end(), [](const GradientSlot& slot) { return slot.has_gradient(); });
}

bool Reducer::is_accumulating() {
  if (phase_ == Phase::idle && window_backwards_ > 0) watch_window();
  return phase_ != Phase::idle || window_backwards_ > 0;
}

void Reducer::set_transform(std::shared_ptr<GradientTransform> transform) {
  std::lock_guard lock(mutex_);
  drain();
  if (is_accumulating()) {
    throw Error(
        ErrorCode::invalid_argument,
        "a gradient transform is set while gradients are being accumulated; set it before a step's first backward");
  }
  require_overlappable(update_options_, transform != nullptr);
  launcher_.pipeline().use(std::move(transform));
}

void Reducer::set_update(Update update, StepInBackwardOptions options) {
  std::lock_guard lock(mutex_);
  drain();
  require_overlappable(options, launcher_.transforms());
  if (options.max_norm && !(*options.max_norm >= 0)) {
    throw Error(ErrorCode::invalid_argument, "max_norm is " + std::to_string(*options.max_norm) +
                                                 "; gradients are clipped to a 2-norm of 0 or more");
  }
  if (is_accumulating()) {
    throw Error(ErrorCode::invalid_argument,
                "an optimizer is put into backward while gradients are being accumulated; do it before a step's first "
                "backward");
  }
  for (const GradientSlot& slot : slots_) {
    if (!update || !has_post_accumulate_hook(slot.parameter())) continue;
    throw Error(
        ErrorCode::invalid_argument,
        "parameter '" + slot.name() +
            "' has a post-accumulate hook, which sees this rank's gradient before it is "
            "averaged and would find none after the optimizer's step; remove it to let the optimizer step in backward");
  }
  update_ = std::move(update);
  update_options_ = std::move(options);
}

void Reducer::leaving(const Error& error) {
  if (options_.rethrow) options_.rethrow(error);
}

void Reducer::transition(Event event) {
  if (event == Event::first_hook && phase_ == Phase::idle) {
    phase_ = sync_ ? Phase::reducing : Phase::local;
  } else if (event == Event::by_hand && phase_ == Phase::idle) {
    phase_ = Phase::reducing;
  } else if (event == Event::leave_rest && phase_ == Phase::reducing) {
    phase_ = Phase::draining;
  } else if ((event == Event::end || event == Event::failure) && phase_ != Phase::idle) {
    const bool drained = std::exchange(phase_, Phase::idle) == Phase::draining;
    if (drained && update_options_.steps_left) update_options_.steps_left(false);
    watch_.reset();
    rest_.watch.reset();
    order_.forget_walk();
  } else {
    throw Error(ErrorCode::internal, "the reducer's phase does not allow what happened; please report this");
  }
}

void Reducer::check_frozen() const {
  for (const NamedTensor& p : options_.frozen) {
    if (!p.tensor.requires_grad()) continue;
    throw Error(ErrorCode::invalid_argument,
                "parameter '" + p.name +
                    "' did not require grad when the module was wrapped and does now, but no forward went "
                    "through the wrapper since; call the wrapper, not the module inside, after unfreezing");
  }
}

void Reducer::expect_backward_from(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  if (!sync_) return;
  order_.expect(hooks_->reached_from(outputs));
}

void Reducer::sync_grads() {
  std::lock_guard lock(mutex_);
  drain();
  if (phase_ != Phase::idle) {
    throw Error(ErrorCode::invalid_argument, "sync_grads() inside a backward; call it after backward has returned");
  }
  if (window_backwards_ > 0) watch_window();
  reduce_by_hand();
}

void Reducer::reduce_by_hand() {
  begin_backward();
  transition(Event::by_hand);
  by_hand_ = true;
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
  if (members.empty()) return "";
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
