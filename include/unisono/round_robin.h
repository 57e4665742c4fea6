#pragma once

#include <unisono/process_group.h>

#include <memory>
#include <vector>

namespace unisono {

/// One group made of k groups of the same ranks: its call i goes to group i mod k, so that k calls are under way at
/// once over engines that serve one at a time.
///
/// *Order*: as for every group, all ranks make the same calls in the same order. A call ends when those before it have
/// ended, unless it has a priority.
///
/// *Memory*: `allocate` takes turns as calls do. A call whose output, or else whose input, lies in memory from
/// `allocate` goes to the group that the memory is from, which can reduce it in place. So, other than in a single
/// group, all ranks must give such memory, or none: ranks that differ fail by `mismatch`, or by `timeout` when they
/// make no other call.
///
/// *Failure*: what fails in one of the groups, or an abort of one, poisons all with the first cause, which names it:
/// "round robin, group 1 of 3 (c10d/gloo): ...". Nobody else may use the groups meanwhile.
///
/// The timeout is the longest of theirs. Local: nothing is sent. *Throws* `invalid_argument` unless there is one group
/// or more, all different and of one rank and size. *Source*: Li et al., PyTorch Distributed: Experiences on
/// Accelerating Data Parallel Training, VLDB 2020, section 5.4.
std::shared_ptr<ProcessGroup> make_round_robin_group(std::vector<std::shared_ptr<ProcessGroup>> groups);

/// The groups that a round robin is made of, in order; none for any other group.
std::vector<std::shared_ptr<ProcessGroup>> groups_of_round_robin(const ProcessGroup& group);

}  // namespace unisono
