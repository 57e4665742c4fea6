#pragma once

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace unisono {

/// One time for several steps in a row, as a `start_timeout` is. It begins to run at once.
class TimeBudget {
 public:
  explicit TimeBudget(std::chrono::nanoseconds whole) : whole_(bounded(whole)) {}

  std::chrono::nanoseconds whole() const { return whole_; }
  bool spent() const { return elapsed() >= whole_; }
  /// What the next step may take: at least a second, so that the last one can still say who is missing.
  std::chrono::nanoseconds left() const {
    return std::max<std::chrono::nanoseconds>(whole_ - elapsed(), std::chrono::seconds(1));
  }

 private:
  std::chrono::nanoseconds elapsed() const { return std::chrono::steady_clock::now() - begin_; }

  std::chrono::nanoseconds whole_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace unisono
