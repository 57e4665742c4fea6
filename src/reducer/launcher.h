#pragma once

#include <unisono/process_group.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "reducer/buckets.h"
#include "reducer/timeline.h"
#include "reducer/transform_pipeline.h"

namespace unisono {

/// How all messages of one backward are averaged.
struct Averaging {
  bool weighted = false;  ///< divide by the sum of weights over ranks instead of by their number
  bool active = false;    ///< divide by the number of ranks that have data: the sum of weights that are 1 or 0
  double weight = 0;      ///< this rank's

  bool has_weights() const { return weighted || active; }

  AllReduceOptions options() const;
};

/// Sends buckets, strictly in plan order, the same on every rank. The last message waits for the end of the backward,
/// for it carries the word on everything that happened in it: the last bucket's, or, where a transform sends the
/// buckets, one of its own.
class Launcher {
 public:
  /// `user`: the wrapper's number among those on the group.
  Launcher(ProcessGroup& group, Timeline& timeline, int user)
      : group_(group), timeline_(timeline), pipeline_(group, timeline), what_(name_of_messages(user)) {}

  /// Called with each bucket as soon as it is known to be averaged; behind a transform, before it is divided.
  std::function<void(std::size_t bucket)> on_ended;

  TransformPipeline& pipeline() { return pipeline_; }
  bool transforms() const { return pipeline_.transform() != nullptr; }

  /// `by_need`: later buckets, of layers that the next forward needs first, may overtake earlier ones on a slow link.
  void begin(Buckets& buckets, std::int64_t step, Averaging averaging, bool by_need);
  /// More weight of this rank, for all messages from here on.
  void add_weight(double weight) { averaging_.weight += weight; }
  /// Whether the next bucket in order may leave although the backward goes on.
  bool next_is_ready() const;
  Bucket& next() { return buckets_->all()[next_]; }
  bool outstanding() const { return ended_ < next_; }
  bool all_launched() const { return next_ == buckets_->all().size(); }
  /// Whether the next bucket's message is the last of this backward.
  bool next_closes() const { return next_ + 1 == buckets_->all().size() && !transforms(); }
  /// Launches `next()` with `control`. `withhold`: take part without data (an abandoned backward).
  void launch(const ControlRecord& control, bool withhold);
  /// Gives `next()`, seen as `bucket`, to the transform.
  void transform(GradientBucket bucket);
  /// Moves what has been launched forward without waiting.
  void poll();
  /// Waits for one bucket that has been launched.
  void wait_for(Bucket& bucket);
  /// Waits for everything; every message is waited for even if an earlier one failed, then the first failure is thrown.
  /// `failed()` is then the bucket it belongs to. Behind a transform a last message with `closing` is sent first.
  void wait(const ControlRecord& closing);
  /// Whether `wait` found buckets that had left before the last weight of a backward was known, and put them right.
  bool corrected() const { return corrected_; }
  /// The combined record of the last message; after `wait`.
  const ControlRecord& verdict() const { return closing_.control(); }
  int failed() const { return failed_; }
  /// Averages a flat tensor beside the buckets, at the end of a backward. *Blocks*.
  void average(const at::Tensor& flat, std::int32_t bucket);

  std::int64_t step() const { return step_; }
  /// What sums over ranks are divided by; after `wait`.
  double divisor() const { return averaging_.has_weights() ? verdict().sums.at(0) : group_.size(); }

 private:
  static const char* name_of_messages(int user);
  void ended(std::size_t index);
  void skip_ended();
  void close(const ControlRecord& control);
  void correct_weights();

  ProcessGroup& group_;
  Timeline& timeline_;
  TransformPipeline pipeline_;
  const char* what_;  // in every message: those of two wrappers must not meet
  Buckets* buckets_ = nullptr;
  Work closing_;
  std::int64_t step_ = -1;
  Averaging averaging_;
  std::size_t next_ = 0;   // first not launched
  std::size_t ended_ = 0;  // first not known to have ended
  int failed_ = -1;
  bool corrected_ = false;
  bool by_need_ = false;
};

}  // namespace unisono
