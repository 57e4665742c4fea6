#pragma once

#include <cstdint>
#include <vector>

#include "comm/process_identity.h"

namespace unisono::shm {

/// Watches the processes of the other ranks. The system itself tells of their end; no time-out is involved.
class Peers {
 public:
  /// *Throws* `internal` when a process cannot be watched.
  Peers(int rank, std::vector<ProcessIdentity> processes);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  /// Bit r is set when the process of rank r has ended. One system call per living peer.
  std::uint64_t dead();
  const ProcessIdentity& process(int rank) const { return processes_[static_cast<std::size_t>(rank)]; }
  /// Whether rank r is a thread of this process.
  bool is_here(int rank) const { return process(rank) == processes_[static_cast<std::size_t>(rank_)]; }
  bool any_here() const { return any_here_; }

 private:
  int rank_;
  std::vector<ProcessIdentity> processes_;
  std::vector<int> pidfds_;  // -1: a thread of this process
  std::uint64_t dead_ = 0;
  bool any_here_ = false;
};

}  // namespace unisono::shm
