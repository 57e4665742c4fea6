#pragma once

#include <time.h>
#include <unisono/stats.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace unisono {

inline std::int64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

/// Keeps the time of a backward: how long, how much of it went to communication, and, when tracing, every event.
class Timeline {
 public:
  void begin_backward() {
    begin_ns_ = monotonic_ns();
    exposed_ns_ = 0;
    current_ = {};
  }
  void count_message(std::size_t bytes) {
    ++current_.messages;
    current_.bytes += static_cast<std::int64_t>(bytes);
  }
  void count_bytes(std::size_t bytes) { current_.bytes += static_cast<std::int64_t>(bytes); }
  void add_exposed(std::int64_t ns) { exposed_ns_ += ns; }
  void count_rebuild() { ++rebuilds_; }
  /// `gradients_end_ns`: when the last gradient had been computed; `buckets` in launch order.
  void end_backward(std::int64_t step, std::int64_t gradients_end_ns, std::vector<BucketStats> buckets) {
    const std::int64_t now = monotonic_ns();
    std::int64_t hidden_from = gradients_end_ns, hidden_to = 0;
    for (const BucketStats& b : buckets) {
      hidden_from = std::min(hidden_from, b.launched_ns);
      hidden_to = std::max(hidden_to, std::min(b.done_ns, gradients_end_ns));
    }
    current_.hidden_s = static_cast<double>(std::max<std::int64_t>(0, hidden_to - hidden_from)) * 1e-9;
    current_.buckets = std::move(buckets);
    current_.step = step;
    current_.backward_s = static_cast<double>(now - begin_ns_) * 1e-9;
    current_.exposed_s = static_cast<double>(exposed_ns_) * 1e-9;
    current_.waiting_s = static_cast<double>(now - gradients_end_ns) * 1e-9;
    current_.rebuilds = rebuilds_;
    last_ = std::move(current_);
    if (tracing_) events_.push_back({"backward", "steps", begin_ns_, now, step, -1});
  }
  const StepStats& last() const { return last_; }

  void set_tracing(bool on) {
    tracing_ = on;
    if (!on) events_.clear();
  }
  bool tracing() const { return tracing_; }
  void record(TraceEvent event) { events_.push_back(std::move(event)); }
  std::vector<TraceEvent> take() { return std::exchange(events_, {}); }

 private:
  std::int64_t begin_ns_ = 0;
  std::int64_t exposed_ns_ = 0;
  int rebuilds_ = 0;
  StepStats current_;
  StepStats last_;
  bool tracing_ = false;
  std::vector<TraceEvent> events_;
};

/// Adds its lifetime to the exposed time of a backward.
class ExposedTime {
 public:
  explicit ExposedTime(Timeline& timeline) : timeline_(timeline), begin_ns_(monotonic_ns()) {}
  ~ExposedTime() { timeline_.add_exposed(monotonic_ns() - begin_ns_); }
  ExposedTime(const ExposedTime&) = delete;
  ExposedTime& operator=(const ExposedTime&) = delete;

 private:
  Timeline& timeline_;
  std::int64_t begin_ns_;
};

}  // namespace unisono
