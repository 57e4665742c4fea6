#pragma once

#include <chrono>
#include <cstdint>

namespace unisono {

/// Nanoseconds of the host's monotonic clock; comparable between the processes of one host.
inline std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace unisono
