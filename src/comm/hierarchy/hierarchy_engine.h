#pragma once

#include <unisono/process_group.h>

#include <memory>
#include <vector>

#include "comm/hierarchy/blocks.h"
#include "comm/hierarchy/journey.h"
#include "comm/host_layout.h"
#include "comm/issuer/engine.h"

namespace unisono {

/// What a hierarchy is made of.
struct HierarchyParts {
  std::unique_ptr<Engine> flat;  ///< over all ranks: notices, device memory, all_to_all
  /// The carriers with this rank's place, one per host, in the order of their ranks; null on a rank that is no carrier.
  std::unique_ptr<Engine> across;
  std::unique_ptr<Engine> leaders;  ///< the first ranks of the hosts, for headers; null on every other
  /// The host's ranks, in three groups; null on a host with one rank.
  std::shared_ptr<ProcessGroup> collect, spread, headers;
  bool ordered = false;  ///< 16-bit sums are rounded once, though calls allow more
};

/// Calls in two levels: shared memory inside a host, any engine between. Of each host as many ranks as its smallest has
/// are *carriers*: the ranks of a host reduce (or collect) in shared memory, each carrier exchanges its slice with its
/// like on the other hosts, the host's ranks hand the slices round in shared memory. What leaves a host in an
/// all-reduce of H hosts is 2 (H - 1) / H of the message, whatever the number of its ranks, and all carriers send at
/// the same time. Headers go the same way, through the first rank of each host. all_to_all and device memory go over
/// `flat`.
///
/// Nothing here blocks: each of the three stretches has groups of its own, sees its calls in the order of the starts,
/// and those of several messages overlap. Sums are trees of hosts of trees of ranks. 16-bit numbers travel between two
/// hosts in 16 bits where they may be rounded at each level, else in f32.
/// *Threads*: as Engine.
class HierarchyEngine final : public Engine {
 public:
  HierarchyEngine(HostLayout layout, HierarchyParts parts);

  bool serves(Device::Kind kind) const override { return flat_->serves(kind); }
  StreamFence fence(const Device& device) const override { return flat_->fence(device); }
  std::unique_ptr<NoticeBoard> notice_board() override { return flat_->notice_board(); }
  /// A large message in parts, so that one is in shared memory while another is between hosts.
  std::vector<DataCall> parts_of(const DataCall& call) const override;
  EngineOp start(const DataCall& call, Milliseconds timeout) override;
  EngineOp gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) override;
  std::vector<int> lost() const override;
  void abort(const Error& cause) override;

 private:
  Journey all_reduce(const DataCall& call, Milliseconds timeout) const;
  Journey broadcast(const DataCall& call, Milliseconds timeout) const;
  Journey all_gather(const DataCall& call, Milliseconds timeout) const;
  Journey reduce_scatter(const DataCall& call, Milliseconds timeout) const;
  EngineOp spread_headers(Buffer all, std::size_t host_bytes, std::size_t bytes, Milliseconds timeout) const;

  bool alone() const { return layout_.own().size() == 1; }  // on its host
  std::size_t carriers() const { return layout_.narrowest(); }
  bool carries() const { return layout_.place < carriers(); }
  Dtype wire_dtype(const DataCall& call) const;

  HostLayout layout_;
  std::unique_ptr<Engine> flat_, across_, leaders_;
  std::shared_ptr<ProcessGroup> collect_, spread_, headers_;
  bool ordered_;
};

}  // namespace unisono
