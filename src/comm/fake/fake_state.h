#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "comm/fake/fake_group.h"

namespace unisono {

/// What one rank brought to a call.
struct FakeEntry {
  FakeCall call;
  Buffer in;   ///< read; for all_reduce and broadcast the same as `out`
  Buffer out;  ///< written
  std::int64_t entered_ns = 0;
};

/// A call of all ranks, from the first that makes it to its end.
struct FakeRound {
  std::vector<std::optional<FakeEntry>> entries;  ///< by rank
  bool released = false;                          ///< by the script
  bool ended = false;
  std::exception_ptr error;
  ControlRecord control;
  bool withheld = false;
  std::vector<std::int64_t> arrivals;
};

/// Moves the data of a round in which all ranks agree, and combines their control records.
void execute(FakeRound& round);

/// How a call is named in a mismatch: "all_reduce of 3 f32 (sum, step 1, bucket 0, gradients)".
std::string describe(const FakeCall& call);

struct FakeWorld::State {
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  int size = 0;
  std::chrono::nanoseconds timeout{0};
  std::deque<FakeRound> rounds;                       ///< by sequence number; references stay valid
  std::vector<std::shared_ptr<ProcessGroup>> groups;  ///< emptied when the world goes
  std::vector<std::int64_t> made;                     ///< calls per rank
  std::vector<bool> lost;
  bool holding = false;
  std::map<std::int64_t, Error> failures;
  std::optional<Error> poison;
  std::vector<std::int64_t> ended;
  std::vector<std::size_t> allocations;  ///< sizes, in order; every rank must follow them

  // All of these want the mutex held.
  FakeRound& round(std::int64_t sequence);
  /// Records the call; the round may end by it. Returns its sequence number.
  std::int64_t enter(FakeEntry entry);
  /// Ends the round if all ranks are there and the script lets it.
  void advance(std::int64_t sequence);
  void end(std::int64_t sequence, std::exception_ptr error);
  /// Poisons the group and ends every unfinished round with the cause.
  void fail(const Error& cause);
  void time_out(std::int64_t sequence, int rank);
  void throw_if_poisoned() const;
  std::string last_call(int rank) const;
};

std::shared_ptr<ProcessGroup> make_fake_group(std::shared_ptr<FakeWorld::State> state, int rank);

}  // namespace unisono
