#pragma once

#include <unisono/process_group.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "comm/shm/allocations.h"
#include "comm/shm/layout.h"
#include "comm/shm/rounds.h"
#include "comm/shm/transfer.h"

namespace unisono::shm {

class Engine;

/// What ranks tell each other while they allocate; rides where the control record would.
struct AllocationCard {
  std::uint64_t room = 0;
  std::uint64_t mapping = 0;  ///< Mapping::id(), for ranks of one process
  std::int32_t fd = -1;
  std::int32_t failed = 0;
  char text[400] = {};
};
static_assert(sizeof(AllocationCard) <= kInlineControl);

/// A call as its maker wants it.
struct Request {
  Operation operation = Operation::barrier;
  Buffer out = {};
  Buffer in = {};
  std::size_t count = 0;  ///< elements, as fingerprints and errors have it
  ReduceOp op = ReduceOp::sum;
  int divide_by_sum = -1;
  int root = 0;
  CallOptions options = {};
  AllocationCard card = {};
};

/// Where a call is on its way. It goes down this list, or to `ended` from anywhere.
enum class Stage : std::uint8_t {
  queued,     ///< its slot is still in use by an earlier call
  entered,    ///< waits for the other ranks to enter
  moving,     ///< all have entered: the records are combined and the data moves
  finishing,  ///< this rank's part is done; waits for the others to be done with its memory
  ended,
};

/// How the data of a call moves; decided when all have entered, the same on all ranks.
enum class Path : std::uint8_t { gather_records, small, in_place, rounds };

/// One call of one rank. Everything but `ended_` belongs to the engine until the call has ended, and is fixed then.
class Call final : public WorkState {
 public:
  Call(std::shared_ptr<Engine> engine, Request request) : request_(std::move(request)), engine_(std::move(engine)) {}

  bool poll() override;
  void wait() override;
  std::exception_ptr error() const override { return has_ended() ? error_ : nullptr; }
  const ControlRecord& control() const override { return combined_; }
  bool withheld() const override { return withheld_; }
  std::vector<std::int64_t> arrivals() const override { return has_ended() ? arrivals_ : std::vector<std::int64_t>{}; }
  const std::vector<AllocationCard>& cards() const { return cards_; }
  bool has_ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  friend class Engine;
  std::size_t control_bytes() const {
    return 8 * (request_.options.control.words.size() + request_.options.control.sums.size());
  }

  Request request_;
  std::shared_ptr<Engine> engine_;
  std::uint64_t sequence_ = 0;
  std::int64_t issued_ns_ = 0;
  std::int64_t deadline_ns_ = 0;
  Stage stage_ = Stage::queued;
  Path path_ = Path::small;
  Transfer transfer_;
  Place place_;
  std::optional<Rounds> rounds_;
  std::vector<std::byte> records_;  ///< all ranks', when they are too large for the slot areas

  ControlRecord combined_;
  bool withheld_ = false;
  std::exception_ptr error_;
  std::vector<std::int64_t> arrivals_;
  std::vector<AllocationCard> cards_;
  std::atomic<bool> ended_{false};
};

}  // namespace unisono::shm
