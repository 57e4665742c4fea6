#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <unisono/process_group.h>

#include "reducer/buckets.h"
#include "reducer/timeline.h"

namespace unisono {

/// How all messages of one backward are averaged.
struct Averaging {
  bool weighted = false;  ///< divide by the sum of weights over ranks instead of by their number
  double weight = 0;      ///< this rank's

  AllReduceOptions options() const;
};

/// Sends buckets, strictly in plan order, the same on every rank. The last one is held back until the end of the
/// backward, for it carries the word on everything that happened in it.
class Launcher {
 public:
  Launcher(ProcessGroup& group, Timeline& timeline) : group_(group), timeline_(timeline) {}

  void begin(Buckets& buckets, std::int64_t step, Averaging averaging);
  /// Whether the next bucket in order may leave although the backward goes on.
  bool next_is_ready() const;
  Bucket& next() { return buckets_->all()[next_]; }
  bool outstanding() const { return ended_ < next_; }
  bool all_launched() const { return next_ == buckets_->all().size(); }
  bool next_is_last() const { return next_ + 1 == buckets_->all().size(); }
  /// Launches `next()`. `control` goes with the last one. `withhold`: take part without data (an abandoned backward).
  void launch(const ControlRecord& control, bool withhold);
  /// Moves what has been launched forward without waiting.
  void poll();
  /// Waits for everything; every message is waited for even if an earlier one failed, then the first failure is thrown.
  /// `failed()` is then the bucket it belongs to.
  void wait();
  /// The combined record of the last message; after `wait`.
  const ControlRecord& verdict() const;
  int failed() const { return failed_; }
  /// Averages a flat tensor beside the buckets, at the end of a backward. *Blocks*.
  void average(const at::Tensor& flat, std::int32_t bucket);

  std::int64_t step() const { return step_; }
  bool weighted() const { return averaging_.weighted; }

 private:
  void ended(std::size_t index);

  ProcessGroup& group_;
  Timeline& timeline_;
  Buckets* buckets_ = nullptr;
  std::int64_t step_ = -1;
  Averaging averaging_;
  std::size_t next_ = 0;   // first not launched
  std::size_t ended_ = 0;  // first not known to have ended
  int failed_ = -1;
};

}  // namespace unisono
