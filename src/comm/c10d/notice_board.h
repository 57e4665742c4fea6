#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/issuer/notice_board.h"

namespace unisono {

/// Notices through the group's store. A TCPStore behind a link that is cut answers nothing and says nothing, for
/// minutes; so a thread of its own, "uni-notices", talks to it, and nobody waits for that longer than `kPatience`. The
/// thread starts with the first notice; one that still hears nothing when the board goes is left to end by itself.
class StoreNoticeBoard final : public NoticeBoard {
 public:
  /// `store` may be null. Takes a connection of its own at the first use.
  StoreNoticeBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size);
  ~StoreNoticeBoard() override;

  void post_failure(const Error& cause) noexcept override;
  std::optional<Error> failure() noexcept override;
  void post_waiting(std::int64_t sequence) noexcept override;
  std::vector<int> absent(std::int64_t sequence) noexcept override;
  std::vector<int> unheard(std::chrono::milliseconds patience) noexcept override;
  std::string silence() noexcept override;

 private:
  struct Talk;
  std::shared_ptr<Talk> talk_;
};

}  // namespace unisono
