#include "reducer/reducer.h"

#include <cmath>

#include <ATen/ATen.h>

namespace unisono {

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
  } else if (event == Event::by_hand && phase_ == Phase::idle) {
    phase_ = Phase::reducing;
  } else if ((event == Event::end || event == Event::failure) && phase_ != Phase::idle) {
    phase_ = Phase::idle;
    watch_.reset();
    order_.forget_walk();
  } else {
    throw Error(ErrorCode::internal, "the reducer's phase does not allow what happened; please report this");
  }
}

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
  transition(Event::by_hand);
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
