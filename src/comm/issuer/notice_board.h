#pragma once

#include <unisono/error.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace unisono {

/// What ranks tell each other beside the calls: that the group has failed and why, and which call a rank is waiting in.
/// Collectives have no such thing: a rank that stops calling leaves its peers waiting without a name.
/// Only written and read by ranks that have waited for a while already. What cannot be delivered is not said.
/// *Threads*: one.
class NoticeBoard {
 public:
  virtual ~NoticeBoard() = default;

  virtual void post_failure(const Error& cause) noexcept = 0;
  /// What another rank has posted.
  virtual std::optional<Error> failure() noexcept = 0;

  virtual void post_waiting(std::int64_t sequence) noexcept = 0;
  /// Ranks that have not said they wait in call `sequence` or a later one; empty when that cannot be known.
  virtual std::vector<int> absent(std::int64_t sequence) noexcept = 0;
  /// Asks everybody for a sign. Ranks that have given none after `patience`, which is waited for: their processes have
  /// ended, or they make no calls. Empty when that cannot be known.
  virtual std::vector<int> unheard(std::chrono::milliseconds) noexcept { return {}; }
  /// Why nothing can be known, for people; empty while notices come and go.
  virtual std::string silence() noexcept { return ""; }
};

}  // namespace unisono
