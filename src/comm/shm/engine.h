#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/shm/bootstrap.h"
#include "comm/shm/call.h"
#include "comm/shm/cause.h"
#include "comm/shm/peers.h"
#include "comm/shm/progress_thread.h"

namespace unisono::shm {

/// Carries out one rank's calls, in the order they were made.
///
/// Nobody waits in here but in `wait`: a call is moved forward by whoever passes by (the maker of the next call, a
/// poll, a waiter, the progress thread) as far as it goes. `mutex_` guards the queue and is never held while data moves
/// or anybody sleeps: the one who moves data sets `busy_` instead. See protocol.h for how ranks agree.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(std::string name, int rank, Attachment attachment, bool eager);

  void start() { progress_.start(shared_from_this()); }
  /// *Throws* the group's cause when it has failed.
  std::shared_ptr<Call> issue(Request request);
  void poll();
  void wait(Call& call);
  void abort(const Error& cause);
  /// Carries out what all ranks have entered, gives up the rest, and tells the peers that this rank has left.
  void close();

  bool pending() const { return pending_.load() > 0; }
  bool is_driven() const { return drivers_.load() > 0; }
  /// Moves the queue forward, and sleeps at most `ns` when it cannot.
  void drive_a_little(std::int64_t ns, const Call* waited = nullptr);

  const Peers& peers() const { return peers_; }
  /// Ranks that have died or left by now.
  std::vector<int> lost() const;
  const std::shared_ptr<Allocations>& allocations() const { return allocations_; }
  /// The same on all ranks, when called once by all ranks after the same call.
  std::uint64_t new_allocation_id() { return allocations_made_.fetch_add(1) + 1; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // engine.cc: the queue
  bool advance(Lock& lock);
  bool enter_calls();
  bool step(Call& head, Lock& lock);
  bool all_done(std::uint64_t sequence) const;
  void publish_done(std::uint64_t sequence, bool failed);
  void retire(Call& call, std::exception_ptr error);
  void unlock_and_sweep(Lock& lock);

  // engine_call.cc: one call without trouble
  Fingerprint fingerprint_of(const Call& call) const;
  void lay_down(Call& call);
  void agree(Call& call);
  void plan_records(Call& call);
  void plan_data(Call& call);
  void plan_path(Call& call);
  bool move_data(Call& call, Lock& lock);
  bool ready_to_write(std::uint64_t sequence) const;
  bool reserve_staging();

  // engine_trouble.cc: deadlines, lost peers, failures
  void throw_if_failed();
  bool look_for_trouble(std::int64_t now);
  bool look_at_head(Call& head, std::int64_t now);
  bool look_at_deadlines(std::int64_t now);
  void look_at_peers(std::int64_t now);
  bool give_up(Call& call, ErrorCode code, const std::string& text);
  std::uint64_t waited_for(const Call& head) const;
  void fail(ErrorCode code, const std::string& text, std::uint64_t from);
  void settle();
  void fail_head(const Error& error);
  void take_memory_along();
  std::string place_of(const Call& call) const;
  std::string last_call_of(int rank) const;
  std::string lost_text(const Call& call) const;
  std::string absent_text(const Call& call) const;

  const std::string name_;
  const std::int64_t spin_ns_;
  Attachment attachment_;
  Team team_;
  Peers peers_;
  std::shared_ptr<Allocations> allocations_ = std::make_shared<Allocations>();

  std::mutex mutex_;
  std::deque<std::shared_ptr<Call>> queue_;
  std::vector<std::shared_ptr<void>> trash_;  ///< owners to let go of without the lock
  std::uint64_t next_ = 0;                    ///< sequence of the next call
  std::uint64_t next_to_enter_ = 0;
  std::uint64_t rounds_made_ = 0;
  bool busy_ = false;
  bool staging_reserved_ = false;

  std::optional<Cause> failed_;
  std::int64_t failed_ns_ = 0;
  std::int64_t next_look_ns_ = 0;
  std::int64_t next_scan_ns_ = 0;
  std::uint64_t gone_ = 0;  ///< bit r: rank r has died or left

  std::atomic<std::uint64_t> allocations_made_{0};
  std::atomic<int> pending_{0};
  std::atomic<int> drivers_{0};
  std::atomic<int> sleepers_here_{0};
  ProgressThread progress_;
};

}  // namespace unisono::shm
