#pragma once

#include <unisono/process_group.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace unisono {

/// One call of one rank, as it was made.
struct FakeCall {
  int rank = 0;
  std::int64_t sequence = 0;  ///< counts the rank's calls from 0
  std::string operation;      ///< "all_reduce", ...
  std::size_t count = 0;      ///< elements of `data`, or of `in`
  Dtype dtype = Dtype::f32;
  ReduceOp op = ReduceOp::sum;
  int root = -1;
  std::int64_t step = -1;
  std::int32_t bucket = -1;
  std::string what;
  ControlRecord control;
  bool withhold = false;
  int divide_by_sum = -1;
  int allocation = -1;     ///< which `allocate` of this rank the data lies in; -1: elsewhere
  std::size_t offset = 0;  ///< bytes into that allocation
};

/// A world of `size` ranks in one process, for tests: the process group contract, played to a script.
///
/// A call ends when all ranks have made it, in the thread of the last one; so ranks may be threads, or all be driven by
/// one thread that makes every rank's call before it waits. Between `hold()` and `release_all()` calls do not end by
/// themselves: each waits for its `release`, in any order the test likes. That is how delays and reordering are told,
/// without a clock.
///
/// *Threads*: everything may be called from any thread.
class FakeWorld {
 public:
  explicit FakeWorld(int size, std::chrono::nanoseconds timeout = std::chrono::minutes(5));
  ~FakeWorld();
  FakeWorld(const FakeWorld&) = delete;
  FakeWorld& operator=(const FakeWorld&) = delete;

  int size() const noexcept;
  /// The group as rank `rank` sees it; always the same object, which may outlive the world.
  std::shared_ptr<ProcessGroup> group(int rank);

  /// From now on calls wait for their release, also those that some ranks have made already.
  void hold();
  /// Lets call `sequence` end once all ranks have made it; it may be released before it is made.
  void release(std::int64_t sequence);
  /// Lets all calls end and stops holding.
  void release_all();
  /// Call `sequence` fails with `cause` as soon as a rank makes it, and poisons the group.
  void fail_at(std::int64_t sequence, const Error& cause);
  /// Rank `rank` is gone: calls it has not made fail everywhere with `peer_lost`.
  void lose(int rank);

  /// *Blocks* until every rank has made call `sequence`. *Throws* `timeout` naming the ranks that have not.
  void wait_until_made(std::int64_t sequence) const;
  /// All calls of a rank, in order.
  std::vector<FakeCall> calls(int rank) const;
  /// Sequence numbers of calls in the order in which they ended.
  std::vector<std::int64_t> ended() const;

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace unisono
