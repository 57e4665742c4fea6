#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace unisono {

/// Nanoseconds of the host's monotonic clock; comparable between the processes of one host.
inline std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// A timeout that can be added to a time. Ten years are as good as none, and the largest number would lie in the past.
constexpr std::chrono::nanoseconds bounded(std::chrono::nanoseconds timeout) {
  return std::min<std::chrono::nanoseconds>(timeout, std::chrono::hours(24 * 3650));
}

inline std::chrono::steady_clock::time_point deadline_after(std::chrono::nanoseconds timeout) {
  return std::chrono::steady_clock::now() + bounded(timeout);
}

}  // namespace unisono
