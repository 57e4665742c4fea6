#include "reducer/launcher.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <string>

#include "base/kept_name.h"
#include "comm/c10d/tensors.h"

namespace unisono {

AllReduceOptions Averaging::options() const {
  AllReduceOptions options;
  options.op = has_weights() ? ReduceOp::sum : ReduceOp::avg;
  if (has_weights()) {
    options.divide_by_sum = 0;
    options.control.sums = {weight};
  }
  return options;
}

const char* Launcher::name_of_messages(int user) {
  return kept_name(user == 0 ? "gradients" : "gradients, wrapper " + std::to_string(user));
}

void Launcher::begin(Buckets& buckets, std::int64_t step, Averaging averaging, bool by_need) {
  buckets_ = &buckets;
  step_ = step;
  averaging_ = averaging;
  by_need_ = by_need;
  next_ = 0;
  ended_ = 0;
  failed_ = -1;
  corrected_ = false;
  closing_ = {};
  pipeline_.forget();
}

bool Launcher::next_is_ready() const {
  const auto& all = buckets_->all();
  return next_ < all.size() && !next_closes() && all[next_].pending <= 0;
}

void Launcher::launch(const ControlRecord& control, bool withhold) {
  RECORD_USER_SCOPE("unisono.launch");
  Bucket& bucket = next();
  AllReduceOptions options = averaging_.options();
  options.tag = {step_, static_cast<std::int32_t>(next_), what_};
  options.control.words = control.words;
  options.withhold = withhold;
  if (by_need_) options.priority = static_cast<std::int32_t>(next_) + 1;
  const bool closes = next_closes();
  bucket.launched = true;
  bucket.stats.launched_ns = monotonic_ns();
  bucket.stats.bytes = static_cast<std::int64_t>(bucket.buffer.bytes());
  ++next_;
  timeline_.count_message(bucket.buffer.bytes());
  bucket.work = group_.all_reduce(bucket.buffer, options);
  if (closes) closing_ = bucket.work;
}

void Launcher::transform(GradientBucket bucket) {
  next().launched = true;
  next().stats.launched_ns = monotonic_ns();
  ++next_;
  pipeline_.start(std::move(bucket));
}

void Launcher::ended(std::size_t index) {
  buckets_->all()[index].ended = true;
  BucketStats& stats = buckets_->all()[index].stats;
  stats.done_ns = monotonic_ns();
  stats.arrivals_ns = buckets_->all()[index].work.arrivals();
  if (on_ended) on_ended(index);
  if (!timeline_.tracing()) return;
  const auto b = static_cast<int>(index);
  timeline_.record({"all-reduce " + std::to_string(index), "all-reduce", stats.launched_ns, stats.done_ns, step_, b});
}

void Launcher::poll() {
  while (!transforms() && ended_ < next_ && buckets_->all()[ended_].work.poll()) ended(ended_++);
}

void Launcher::skip_ended() {
  while (ended_ < next_ && buckets_->all()[ended_].ended) ++ended_;
}

void Launcher::wait_for(Bucket& bucket) {
  RECORD_USER_SCOPE("unisono.wait");
  if (bucket.ended) return;
  bucket.work.wait();
  ended(static_cast<std::size_t>(&bucket - buckets_->all().data()));
  skip_ended();
}

// The results of transforms are in the buckets before the last message tells what they are to be divided by.
void Launcher::close(const ControlRecord& control) {
  pipeline_.finish([&](std::size_t index) { ended(index); });
  ended_ = next_;
  CallOptions options;
  options.tag = {step_, -1, "end of backward"};
  options.control = control;
  if (averaging_.has_weights()) options.control.sums = {averaging_.weight};
  timeline_.count_message(0);
  closing_ = group_.barrier(options);
  closing_.wait();
  const bool weights = averaging_.has_weights();
  const double factor = pipeline_.factor(weights, weights ? divisor() : 0);
  if (factor == 1) return;
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_->all()) factor == 0 ? bucket.flat.zero_() : bucket.flat.mul_(factor);
}

void Launcher::wait(const ControlRecord& closing) {
  RECORD_USER_SCOPE("unisono.wait");
  if (transforms()) return close(closing);
  std::exception_ptr first;
  for (skip_ended(); ended_ < next_; ++ended_, skip_ended()) {
    try {
      buckets_->all()[ended_].work.wait();
      ended(ended_);
    } catch (...) {
      if (!first) {
        first = std::current_exception();
        failed_ = static_cast<int>(ended_);
      }
    }
  }
  if (first) std::rethrow_exception(first);
  if (averaging_.has_weights() && !closing_.withheld()) correct_weights();
}

// A backward of a sum of weighted losses may reach parameters of one loss before it reaches another loss: the buckets
// that left meanwhile were divided by less than the whole weight.
void Launcher::correct_weights() {
  const double whole = divisor();
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_->all()) {
    const double known = bucket.work.control().sums.at(0);
    if (known == whole) continue;
    bucket.flat.mul_(known / whole);
    corrected_ = true;
  }
}

void Launcher::average(const at::Tensor& flat, std::int32_t bucket) {
  AllReduceOptions options = averaging_.options();
  options.tag = {step_, bucket, "late gradients"};
  const Buffer buffer = buffer_of(flat, "a late gradient");
  timeline_.count_message(buffer.bytes());
  group_.all_reduce(buffer, options).wait();
}

}  // namespace unisono
