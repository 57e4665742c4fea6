#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/shm/protocol.h"

namespace unisono::shm {

// What lies in shared memory. Every word is written by one rank, or by atomic addition or compare-and-swap; nothing is
// reset. The *control segment* (made by rank 0) holds what all ranks read at every call. Each rank has a *staging*
// memory of its own, of which pages exist only once a call needs them.

inline constexpr int kMaxRanks = 64;
inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kInlineControl = 512;   ///< control record bytes that ride in the header
inline constexpr std::size_t kSlotBytes = 16 << 10;  ///< per slot and rank: larger records, and data of small calls
inline constexpr std::size_t kChunkBytes = 128 << 10;
inline constexpr int kChunkBuffers = 4;
inline constexpr std::size_t kStagingBytes = kSlots * kSlotBytes + kChunkBuffers * kChunkBytes;

enum class Operation : std::uint8_t {
  all_reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  barrier,
  allocate
};

/// What must be the same on all ranks for a call to happen. No padding: compared as bytes.
struct Fingerprint {
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;
  std::int64_t step = -1;
  std::int32_t bucket = -1;
  std::int32_t root = 0;
  std::int32_t divide_by_sum = -1;
  std::uint32_t words = 0;  ///< of the control record
  std::uint32_t sums = 0;
  Operation operation = Operation::barrier;
  std::uint8_t dtype = 0;
  std::uint8_t reduce_op = 0;
  std::uint8_t spare = 0;
  char what[32] = {};
};
static_assert(sizeof(Fingerprint) == 80);

/// What a rank lays down before it enters a call. One per rank and slot.
struct alignas(kLine) Header {
  Fingerprint fingerprint;
  std::uint64_t allocation = 0;  ///< that holds the buffer; 0: none
  std::uint64_t offset = 0;
  std::int64_t entered_ns = 0;
  std::uint64_t withhold = 0;
  alignas(kLine) std::byte control[kInlineControl];
};

struct alignas(kLine) Gate {
  std::atomic<std::uint64_t> word;
};

/// Written by one rank. The last three count rounds of staged data over the life of the group.
struct RankWords {
  alignas(kLine) std::atomic<std::uint64_t> entered;  ///< calls entered so far
  std::atomic<std::uint64_t> left;                    ///< 1 once the rank has destroyed its group
  alignas(kLine) std::atomic<std::uint64_t> done;     ///< see done_word
  alignas(kLine) std::atomic<std::uint64_t> published;
  std::atomic<std::uint64_t> reduced;
  std::atomic<std::uint64_t> taken;
};

/// Where sleepers sleep. A 32-bit word, because that is what a futex is.
struct EventWords {
  alignas(kLine) std::atomic<std::uint32_t> version;
  alignas(kLine) std::atomic<std::uint32_t> sleepers;
};

/// The first failure of the group.
struct CauseArea {
  static constexpr std::size_t kText = 1536;
  std::atomic<std::uint32_t> state;  ///< 0 none, 1 being written, 2 there
  std::uint32_t code;
  std::uint64_t from;  ///< the first call that fails with it
  std::uint32_t length;
  char text[kText];
};

struct SegmentHead {
  std::uint64_t magic;
  std::uint32_t size;
  std::atomic<std::uint32_t> attached;
  EventWords event;
  alignas(kLine) CauseArea cause;
  Gate gates[kSlots];
};

inline constexpr std::uint64_t kMagic = 0x31306f736e6f696eull;

/// Where things are in a control segment of `size` ranks.
class ControlSegment {
 public:
  ControlSegment(void* base, int size) : base_(static_cast<std::byte*>(base)), size_(size) {}

  static std::size_t bytes(int size) {
    const auto n = static_cast<std::size_t>(size);
    return sizeof(SegmentHead) + n * sizeof(RankWords) + n * kSlots * sizeof(Header);
  }

  SegmentHead& head() const { return *reinterpret_cast<SegmentHead*>(base_); }
  RankWords& words(int rank) const { return reinterpret_cast<RankWords*>(base_ + sizeof(SegmentHead))[rank]; }
  Header& header(int rank, std::uint64_t sequence) const {
    auto* headers =
        reinterpret_cast<Header*>(base_ + sizeof(SegmentHead) + static_cast<std::size_t>(size_) * sizeof(RankWords));
    return headers[static_cast<std::size_t>(rank) * kSlots + sequence % kSlots];
  }
  std::atomic<std::uint64_t>& gate(std::uint64_t sequence) const { return head().gates[sequence % kSlots].word; }
  int size() const { return size_; }

 private:
  std::byte* base_;
  int size_;
};

/// Where things are in a rank's staging memory.
inline std::byte* slot_area(void* staging, std::uint64_t sequence) {
  return static_cast<std::byte*>(staging) + (sequence % kSlots) * kSlotBytes;
}
inline std::byte* chunk_buffer(void* staging, std::uint64_t round) {
  return static_cast<std::byte*>(staging) + kSlots * kSlotBytes + (round % kChunkBuffers) * kChunkBytes;
}

}  // namespace unisono::shm
