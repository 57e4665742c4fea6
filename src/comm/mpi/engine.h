#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <vector>

#include "comm/issuer/engine.h"
#include "comm/mpi/library.h"
#include "comm/mpi/notice_board.h"

namespace unisono {

/// A communicator of its own, made from another: collective.
class MpiCommunicator {
 public:
  /// *Blocks*. *Throws* `timeout` when not all ranks of `parent` come.
  MpiCommunicator(MpiLibrary& library, MpiHandle parent, std::chrono::nanoseconds timeout);
  ~MpiCommunicator();
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  MpiHandle handle() const { return handle_; }
  /// After a failure: something may still be in flight on it.
  void keep() { keep_ = true; }

 private:
  MpiLibrary& library_;
  MpiHandle handle_{};
  bool keep_ = false;
};

struct MpiEngineOptions {
  std::chrono::nanoseconds timeout = std::chrono::minutes(30);
  std::chrono::nanoseconds start_timeout = std::chrono::minutes(5);
  std::size_t longest_block = kMpiLongestBlock;  ///< of one request, in bytes
};

/// Nonblocking collectives of MPI. MPI only moves bytes: sums are ours, so that they have the bits they have over any
/// transport of ours, and no MPI's idea of f16, bool or NaN matters. An all-reduce is an all-to-all of slices, the sum,
/// and an all-gather, which is as many bytes as a ring's; between two ranks, or when it is short, one all-gather and
/// the sum.
///
/// MPI works on copies: what it has been given it keeps until the end, and a call that fails ends before.
/// *Threads*: as Engine.
class MpiEngine final : public Engine {
 public:
  /// *Collective* over `parent`, and as MpiCommunicator.
  MpiEngine(MpiLibrary& library, MpiHandle parent, const MpiEngineOptions& options);

  /// *Collective*. *Blocks* for the number of the group.
  std::unique_ptr<NoticeBoard> notice_board() override;
  std::vector<DataCall> parts_of(const DataCall& call) const override;
  EngineOp start(const DataCall& call, Milliseconds timeout) override;
  EngineOp gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) override;
  void abort(const Error& cause) override;

 private:
  using Transfer = std::shared_ptr<MpiTransfer>;
  EngineOp all_reduce(const DataCall& call);
  EngineOp reduce_gathered(const DataCall& call);
  EngineOp reduce_scatter(const DataCall& call);
  EngineOp broadcast(const DataCall& call);
  EngineOp all_gather(const DataCall& call);
  EngineOp all_to_all(const DataCall& call);
  void gather(const Transfer& transfer, const MpiCommunicator& comm, std::size_t block) const;
  void exchange(const Transfer& transfer, std::byte* in, std::byte* out, std::size_t block) const;

  std::size_t ranks() const { return static_cast<std::size_t>(info().size); }
  std::size_t own() const { return static_cast<std::size_t>(info().rank); }

  MpiLibrary& library_;
  MpiNoticeBoard* board_ = nullptr;  // the issuer's
  std::size_t longest_block_;
  std::chrono::nanoseconds start_timeout_;
  MpiCommunicator calls_;    // what all ranks begin in the order of the calls; notices too
  MpiCommunicator seconds_;  // the second halves of all-reduces
};

}  // namespace unisono
