#pragma once

#include <unisono/gradient_transform.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "reducer/buckets.h"
#include "reducer/timeline.h"

namespace unisono {

/// The buckets of one backward under a transform.
class TransformPipeline {
 public:
  TransformPipeline(ProcessGroup& group, Timeline& timeline) : group_(group), timeline_(timeline) {}

  void use(std::shared_ptr<GradientTransform> transform) { transform_ = std::move(transform); }
  const std::shared_ptr<GradientTransform>& transform() const { return transform_; }

  /// Starts the next bucket; buckets that are under way go one round further first when there is more than one.
  /// *Throws* `Error` after the group has been ended with it, when the transform throws.
  void start(GradientBucket bucket);
  /// *Blocks* until every bucket holds its result. `on_done(index)` after each.
  template <typename OnDone>
  void finish(OnDone on_done) {
    for (bool all = false; !all;) {
      all = true;
      for (std::size_t i = 0; i < flights_.size(); ++i) {
        if (flights_[i].task->done()) continue;
        go_on(flights_[i]);
        if (flights_[i].task->done()) on_done(static_cast<std::size_t>(flights_[i].bucket));
        all = all && flights_[i].task->done();
      }
    }
    flights_.clear();
  }
  void forget() { flights_.clear(); }
  /// By what the result is to be multiplied to be the average; `total_weight` over all ranks, ignored when not
  /// weighted.
  double factor(bool weighted, double total_weight) const;

 private:
  struct Flight {
    int bucket;
    std::unique_ptr<GradientChannel> channel;  // outlives the task, which refers to it
    std::optional<TransformTask> task;
    std::size_t counted = 0;
    int counted_messages = 0;
  };
  void go_on(Flight& flight);
  void account(Flight& flight);
  template <typename Body>
  void guarded(int bucket, Body body);

  ProcessGroup& group_;
  Timeline& timeline_;
  std::shared_ptr<GradientTransform> transform_;
  std::deque<Flight> flights_;
};

}  // namespace unisono
