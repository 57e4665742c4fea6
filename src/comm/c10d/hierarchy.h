#pragma once

#include <unisono/c10d.h>
#include <unisono/process_group.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/c10d/engine.h"

namespace unisono {

/// All-reduces in two levels: the ranks of a host reduce in shared memory, each carrier sums its slice with its like on
/// the other hosts, the host's ranks hand the slices round in shared memory. What leaves a host is 2 (H - 1) / H of the
/// message, whatever the number of its ranks, and all carriers send at the same time.
///
/// Nothing here blocks: each of the three parts has groups of its own, sees its calls in the order of the starts, and
/// the parts of several messages overlap. 16-bit numbers travel between two hosts in 16 bits where they may be rounded
/// at each level, else in f32. *Threads*: one.
class Hierarchy {
 public:
  /// `across`: the carriers with this rank's local number, one per host; null where the rank carries nothing or there
  /// is one host. `collect` and `spread`: two groups of the host's ranks; null on a host with one rank.
  Hierarchy(HostPlace place, c10::intrusive_ptr<c10d::ProcessGroup> across, std::shared_ptr<ProcessGroup> collect,
            std::shared_ptr<ProcessGroup> spread);

  /// CPU memory. Three staged operations, see EngineOp.
  EngineOp all_reduce(const DataCall& call, std::chrono::milliseconds timeout) const;
  /// A large message in parts, so that one is in shared memory while another is between hosts.
  std::vector<DataCall> parts_of(const DataCall& call) const;
  void abort(const Error& cause) const;

 private:
  HostPlace place_;
  std::unique_ptr<Engine> across_;
  std::shared_ptr<ProcessGroup> collect_;
  std::shared_ptr<ProcessGroup> spread_;
};

}  // namespace unisono
