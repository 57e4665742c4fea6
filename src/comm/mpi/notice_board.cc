#include "comm/mpi/notice_board.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>

namespace unisono {

struct MpiNoticeBoard::Notice {
  std::uint64_t group = 0;
  std::int64_t sequence = -1;  // waiting in this call; else the group has failed
  std::int32_t code = 0;
  std::int32_t unused = 0;
  std::array<char, 2000> text{};

  std::size_t size() const { return sequence >= 0 ? offsetof(Notice, text) : sizeof(Notice); }
};

MpiNoticeBoard::MpiNoticeBoard(MpiLibrary& library, MpiHandle comm, int rank, int size, std::uint64_t group)
    : library_(library), comm_(comm), rank_(rank), group_(group), waiting_(static_cast<std::size_t>(size), -1) {}

void MpiNoticeBoard::post(const Notice& notice) {
  std::erase_if(sent_, [](const auto& message) { return message->done(); });
  for (int to = 0; to < static_cast<int>(waiting_.size()); ++to) {
    if (to == rank_) continue;
    sent_.push_back(std::make_unique<MpiTransfer>(library_, "MPI_Isend", sizeof(Notice)));
    MpiTransfer& message = *sent_.back();
    std::memcpy(message.data(), &notice, notice.size());
    message.start([&](const MpiShim& mpi, MpiHandle* request) {
      return mpi.send(comm_, message.data(), static_cast<std::int64_t>(notice.size()), to, request);
    });
  }
}

void MpiNoticeBoard::read() {
  for (Notice notice;;) {
    int from = -1;
    library_.call("MPI_Improbe", [&](const MpiShim& mpi) { return mpi.receive(comm_, &notice, sizeof notice, &from); });
    if (from < 0) return;
    if (notice.group != group_) continue;
    if (notice.sequence >= 0) {
      waiting_[static_cast<std::size_t>(from)] = notice.sequence;
    } else if (!failure_) {
      notice.text.back() = 0;
      failure_.emplace(static_cast<ErrorCode>(notice.code), notice.text.data());
    }
  }
}

// A notice that cannot be delivered changes nothing: MPI's own error or the deadline comes anyway. It is this rank's
// last message for some time, so it is seen off: a message to a new peer needs MPI to work on it.
void MpiNoticeBoard::post_failure(const Error& cause) noexcept try {
  constexpr auto kPatience = std::chrono::milliseconds(200);
  read();
  if (failure_) return;  // everybody has been told
  Notice notice;
  notice.group = group_;
  notice.code = static_cast<std::int32_t>(cause.code());
  std::strncpy(notice.text.data(), cause.what(), notice.text.size() - 1);
  post(notice);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  const auto all_sent = [this] {
    return std::all_of(sent_.begin(), sent_.end(), [](const auto& message) { return message->done(); });
  };
  while (!all_sent() && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
} catch (const std::exception&) {
}

std::optional<Error> MpiNoticeBoard::failure() noexcept try {
  read();
  return failure_;
} catch (const std::exception&) {
  return std::nullopt;
}

void MpiNoticeBoard::post_waiting(std::int64_t sequence) noexcept try {
  Notice notice;
  notice.group = group_;
  notice.sequence = sequence;
  post(notice);
} catch (const std::exception&) {
}

std::vector<int> MpiNoticeBoard::absent(std::int64_t sequence) noexcept try {
  read();
  std::vector<int> out;
  for (std::size_t r = 0; r < waiting_.size(); ++r)
    if (static_cast<int>(r) != rank_ && waiting_[r] < sequence) out.push_back(static_cast<int>(r));
  return out;
} catch (const std::exception&) {
  return {};
}

}  // namespace unisono
