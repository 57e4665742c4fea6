#pragma once

#include <unisono/unisono.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace unisono::differential {

/// Threads that play ranks, and one shared-memory group per world size that serves case after case: making a group
/// costs more than running a case. *Threads*: used from one thread.
class RankPool {
 public:
  /// `timeout`: of every call of the groups.
  explicit RankPool(std::chrono::nanoseconds timeout) : timeout_(timeout) {}
  ~RankPool();
  RankPool(const RankPool&) = delete;
  RankPool& operator=(const RankPool&) = delete;

  /// `body` returns whether its group may be used again, and throws nothing. *Blocks* until all ranks have returned.
  /// Returns what kept a group from being made, empty when nothing did.
  std::string run(int world, const std::function<bool(const std::shared_ptr<ProcessGroup>&)>& body);
  /// The next run of this size gets a new group.
  void renew(int world) { groups_.erase(world); }

 private:
  void serve(std::size_t rank);
  void each(int world, std::function<void(std::size_t)> job);
  std::string make_groups(int world);

  std::chrono::nanoseconds timeout_;
  std::map<int, std::vector<std::shared_ptr<ProcessGroup>>> groups_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
  std::function<void(std::size_t)> job_;
  std::uint64_t round_ = 0;
  std::size_t wanted_ = 0;  // threads of this round
  std::size_t running_ = 0;
  bool stop_ = false;
};

}  // namespace unisono::differential
