#include "reducer/launcher.h"

#include <string>

namespace unisono {

AllReduceOptions Averaging::options() const {
  AllReduceOptions options;
  options.op = weighted ? ReduceOp::sum : ReduceOp::avg;
  if (weighted) {
    options.divide_by_sum = 0;
    options.control.sums = {weight};
  }
  return options;
}

void Launcher::begin(Buckets& buckets, std::int64_t step, Averaging averaging) {
  buckets_ = &buckets;
  step_ = step;
  averaging_ = averaging;
  next_ = 0;
  ended_ = 0;
  failed_ = -1;
}

bool Launcher::next_is_ready() const {
  const auto& all = buckets_->all();
  return next_ + 1 < all.size() && all[next_].pending <= 0;
}

void Launcher::launch(const ControlRecord& control, bool withhold) {
  Bucket& bucket = next();
  AllReduceOptions options = averaging_.options();
  options.tag = {step_, static_cast<std::int32_t>(next_), "gradients"};
  options.control.words = control.words;
  options.withhold = withhold;
  bucket.launched = true;
  bucket.launched_ns = monotonic_ns();
  ++next_;
  timeline_.count_message(bucket.buffer.bytes());
  bucket.work = group_.all_reduce(bucket.buffer, options);
}

void Launcher::ended(std::size_t index) {
  if (!timeline_.tracing()) return;
  const Bucket& bucket = buckets_->all()[index];
  const auto b = static_cast<int>(index);
  timeline_.record({"all-reduce " + std::to_string(index), "all-reduce", bucket.launched_ns, monotonic_ns(), step_, b});
}

void Launcher::poll() {
  while (ended_ < next_ && buckets_->all()[ended_].work.poll()) ended(ended_++);
}

void Launcher::wait() {
  std::exception_ptr first;
  for (; ended_ < next_; ++ended_) {
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
}

const ControlRecord& Launcher::verdict() const { return buckets_->all().back().work.control(); }

void Launcher::average(const at::Tensor& flat, std::int32_t bucket) {
  const WireType type = wire_type(flat.scalar_type(), "a late gradient");
  AllReduceOptions options = averaging_.options();
  options.tag = {step_, bucket, "late gradients"};
  auto owner = std::make_shared<at::Tensor>(flat);
  const Buffer buffer{flat.data_ptr(), static_cast<std::size_t>(flat.numel() * type.parts), type.dtype,
                      place_of(flat), owner};
  timeline_.count_message(buffer.bytes());
  group_.all_reduce(buffer, options).wait();
}

}  // namespace unisono
