#pragma once

#include <cstdint>
#include <vector>

namespace unisono {

/// A few bytes to a few KB that travel with a collective, beside its data and never inside it, and are combined
/// over ranks before any data is touched. In shared memory it rides in the arrival header for nothing; other engines
/// pay one small extra exchange.
///
/// *Shape*: all ranks must send the same number of words and of sums for the same call, else the call is a mismatch.
struct ControlRecord {
  std::vector<std::uint64_t> words;  ///< combined by bitwise or
  std::vector<double> sums;          ///< combined by addition, as a balanced binary tree over ranks

  bool empty() const noexcept { return words.empty() && sums.empty(); }
};

}  // namespace unisono
