#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/issuer/notice_board.h"

namespace unisono {

/// Notices through the group's store. A store that is gone says nothing.
class StoreNoticeBoard final : public NoticeBoard {
 public:
  /// `store` may be null. Takes a connection of its own at the first use.
  StoreNoticeBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  void post_failure(const Error& cause) noexcept override;
  std::optional<Error> failure() noexcept override;
  void post_waiting(std::int64_t sequence) noexcept override;
  std::vector<int> absent(std::int64_t sequence) noexcept override;

 private:
  std::string key(const std::string& name) const { return prefix_ + name; }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  std::string prefix_;
  bool own_connection_ = false;
};

}  // namespace unisono
