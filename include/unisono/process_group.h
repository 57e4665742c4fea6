#pragma once

#include <unisono/buffer.h>
#include <unisono/control_record.h>
#include <unisono/error.h>
#include <unisono/work.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace unisono {

class RecordedGroup;

/// Who calls and why; only for fingerprints and error messages. The reducer fills it in.
struct CallTag {
  std::int64_t step = -1;    ///< -1: not part of a training step
  std::int32_t bucket = -1;  ///< -1: not a bucket
  const char* what = "";     ///< a literal such as "gradients", "buffers", "digest"; named in errors, compared by text
};

/// What every call takes.
struct CallOptions {
  std::chrono::nanoseconds timeout{0};  ///< from the moment of the call; 0: the group's own
  CallTag tag = {};
  ControlRecord control = {};
  /// This rank takes part but gives no data: the call ends everywhere with `Work::withheld()`, the control record
  /// combined and every rank's data untouched. One rank is enough.
  bool withhold = false;
  /// Above 0: of calls that wait for a slow link, the group may serve those with a higher priority first; what is
  /// served when, all ranks decide alike. 0: in order. Groups that serve every call at once take no notice; where it
  /// counts, it is part of the fingerprint.
  std::int32_t priority = 0;
};

struct AllReduceOptions : CallOptions {
  ReduceOp op = ReduceOp::sum;
  /// >= 0: divide the result (floating dtypes, op sum) by this entry of the combined `control.sums`, in the same pass
  /// that writes it; a divisor of 0 gives zeros. This is how averages with a true denominator are made.
  int divide_by_sum = -1;
  /// Groups that reduce in several levels may round f16 and bf16 sums at each of them, so that 16 bits travel between
  /// hosts. Without it such sums are rounded once.
  bool may_round = false;
};

/// A fixed set of ranks that can call collectives together: the contract every transport implements.
///
/// *Order*: all ranks make the same calls in the same order; several may be in flight. Every call carries a
/// fingerprint (operation, sequence number, dtype, count, reduce op, root, tag, control shape); where ranks differ,
/// no data is touched and every rank's call fails with `mismatch` naming both sides.
///
/// *Failure*: a failed call poisons the group: every later call, on every rank, fails with the first cause. A call made
/// on a poisoned group throws at once. Every wait has a deadline. A dead peer is noticed by itself (`peer_lost`), not
/// by time-out, where the transport can tell; over MPI it is the deadline (`timeout`). After a failed call the
/// content of its output is unspecified, but nobody writes to it any more.
///
/// *Arguments* that are wrong on their own (dtype without that op, null data with count > 0, negative root, a buffer
/// on a device this group does not serve) throw `invalid_argument` at the call, locally, and do not poison the group.
///
/// *Progress*: a call that was made is completed even if its caller never returns to wait for it.
///
/// *Threads*: calls may come from any thread, but it is the caller's business that their order is the same on all
/// ranks.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// The transport and its place, e.g. "shm"; used in error messages.
  const std::string& name() const noexcept { return name_; }
  std::chrono::nanoseconds timeout() const noexcept { return timeout_; }
  /// Counts what is built upon this group: 0, 1, ... Ranks that build alike get alike numbers, and can tell from each
  /// other's tags whose message meets whose.
  int number_user() noexcept { return users_.fetch_add(1); }

  /// Reduces `data` over ranks in place. Buffers that lie wholly inside memory from `allocate` (at the same offset of
  /// the same allocation on all ranks) are reduced where they are; others are staged.
  virtual Work all_reduce(Buffer data, const AllReduceOptions& options = {}) = 0;
  /// Copies `data` of rank `root` to all.
  virtual Work broadcast(Buffer data, int root, const CallOptions& options = {}) = 0;
  /// `out` (size() x in.count) receives every rank's `in`, in rank order. `in` may lie inside `out` at its own place.
  virtual Work all_gather(Buffer out, Buffer in, const CallOptions& options = {}) = 0;
  /// `in` (size() x out.count) is reduced; rank r receives block r in `out`.
  virtual Work reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options = {}) = 0;
  /// Block j of rank i's `in` becomes block i of rank j's `out`; equal blocks of in.count / size() elements.
  virtual Work all_to_all(Buffer out, Buffer in, const CallOptions& options = {}) = 0;
  /// Ends when every rank has entered. Also the cheapest carrier of a control record.
  virtual Work barrier(const CallOptions& options = {}) = 0;

  /// Memory this transport reduces in place: zeroed u8, aligned to 4096 bytes, given back when the last copy of `owner`
  /// goes (that is local, not collective). *Collective*, with the same size on all ranks. *Blocks*.
  /// *Throws* `invalid_argument` naming the room there is when it does not fit, on every rank.
  virtual Buffer allocate(std::size_t bytes) = 0;

  /// Poisons the group on every rank with `cause`; calls in flight fail with it. Harmless when already poisoned.
  /// *Blocks*: never. *Threads*: from any thread.
  virtual void abort(const Error& cause) = 0;

 protected:
  ProcessGroup(int rank, int size, std::string name, std::chrono::nanoseconds timeout)
      : rank_(rank), size_(size), name_(std::move(name)), timeout_(timeout) {}

 private:
  int rank_;
  int size_;
  std::string name_;
  std::chrono::nanoseconds timeout_;

  std::atomic<int> users_ = 0;
  friend std::shared_ptr<ProcessGroup> companion(const std::shared_ptr<ProcessGroup>& group);
  friend std::shared_ptr<RecordedGroup> recorded_companion(const std::shared_ptr<ProcessGroup>& group);
  friend void set_companion(const std::shared_ptr<ProcessGroup>& group, std::shared_ptr<ProcessGroup> companion);
  std::mutex companion_mutex_;
  std::shared_ptr<RecordedGroup> companion_;  // see companion.h
};

}  // namespace unisono
