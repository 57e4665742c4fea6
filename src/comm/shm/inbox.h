#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/shm/layout.h"

namespace unisono::shm {

// Every rank has an *inbox*: memory of its own in which each other rank has a *lane*, a ring of bytes that only that
// rank writes. A lane carries messages one after the other: a header, then the data in steps as large as there is room,
// then bytes without meaning up to the next line. The pages of a lane exist once it is used. What was sent stays with
// the receiver when the sender has ended.

inline constexpr std::size_t kLaneBytes = 256 << 10;

struct MailHeader {
  std::int64_t tag = 0;
  std::uint64_t count = 0;
  std::uint64_t dtype = 0;
  std::uint64_t spare[5] = {};
};
static_assert(sizeof(MailHeader) == kLine);

/// Bytes that have ever gone through a lane.
struct LaneWords {
  alignas(kLine) std::atomic<std::uint64_t> written;
  alignas(kLine) std::atomic<std::uint64_t> read;
};

class Inbox {
 public:
  Inbox(std::byte* base, int size) : base_(base), size_(static_cast<std::size_t>(size)) {}

  /// The part whose pages exist from the start.
  static std::size_t front_bytes(int size) {
    const std::size_t words = sizeof(EventWords) + static_cast<std::size_t>(size) * sizeof(LaneWords);
    return (words + 4095) / 4096 * 4096;
  }
  static std::size_t bytes(int size) { return front_bytes(size) + static_cast<std::size_t>(size) * kLaneBytes; }

  /// Where the owner sleeps: until mail comes, or room in another's inbox.
  EventWords& event() const { return *reinterpret_cast<EventWords*>(base_); }
  LaneWords& words(int sender) const { return reinterpret_cast<LaneWords*>(base_ + sizeof(EventWords))[sender]; }
  std::byte* lane(int sender) const { return base_ + lane_offset(sender); }
  std::size_t lane_offset(int sender) const {
    return front_bytes(static_cast<int>(size_)) + static_cast<std::size_t>(sender) * kLaneBytes;
  }

 private:
  std::byte* base_;
  std::size_t size_;
};

}  // namespace unisono::shm
