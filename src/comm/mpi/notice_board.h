#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/issuer/notice_board.h"
#include "comm/mpi/library.h"

namespace unisono {

/// Notices as messages from rank to rank, short enough for MPI to hold until they are read.
class MpiNoticeBoard final : public NoticeBoard {
 public:
  /// Nobody else may send messages on `comm`; collectives do not matter. `group`: a number that all ranks of the group
  /// know and other groups do not have: what comes with another was meant for a communicator that is gone, see shim.cc.
  MpiNoticeBoard(MpiLibrary& library, MpiHandle comm, int rank, int size, std::uint64_t group);

  void post_failure(const Error& cause) noexcept override;
  std::optional<Error> failure() noexcept override;
  void post_waiting(std::int64_t sequence) noexcept override;
  std::vector<int> absent(std::int64_t sequence) noexcept override;
  /// Takes what has come, so that a rank that others often wait for does not pile up what they say.
  void read();

 private:
  struct Notice;
  void post(const Notice& notice);

  MpiLibrary& library_;
  MpiHandle comm_;
  int rank_;
  std::uint64_t group_;
  std::vector<std::int64_t> waiting_;  // per rank, the call it said it waits in; -1 for none
  std::optional<Error> failure_;
  std::vector<std::unique_ptr<MpiTransfer>> sent_;
};

}  // namespace unisono
