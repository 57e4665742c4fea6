#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <unisono/error.h>

namespace unisono {

/// What ranks tell each other beside the engine, through the group's store: that the group has failed and why, and which call
/// a rank is waiting in. Engines have no such thing: a rank that stops calling leaves its peers waiting without a name.
/// Only written and read by ranks that have waited for a while already. A store that is gone says nothing.
/// *Threads*: one.
class NoticeBoard {
 public:
  /// `store` may be null. Takes a connection of its own at the first use.
  NoticeBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  void post_failure(const Error& cause) noexcept;
  std::optional<Error> failure() noexcept;

  void post_waiting(std::int64_t sequence) noexcept;
  /// Ranks that have not said they wait in call `sequence`; empty when that cannot be known.
  std::vector<int> absent(std::int64_t sequence) noexcept;

 private:
  std::string key(const std::string& name) const { return prefix_ + name; }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  std::string prefix_;
  bool own_connection_ = false;
};

}  // namespace unisono
