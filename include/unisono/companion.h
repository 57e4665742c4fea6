#pragma once

#include <unisono/process_group.h>

#include <memory>

namespace unisono {

/// A second group of the same ranks over the same transport, made at the first call and kept with `group`: for
/// collectives whose place between those of `group` need not be the same on all ranks. SyncBatchNorm's are such:
/// gradient buckets leave whenever they are full, a layer's backward runs when autograd comes to it, and which of the
/// two is first may differ from rank to rank.
///
/// A world of one is its own companion. Shared memory meets through a file in the temporary directory, which is removed
/// again. That of a round robin is its first group's. Over torch.distributed Python makes one by `new_group`; in C++
/// make a second group, give it to `set_companion`. Its timeout is the group's.
///
/// *Collective* at the first call. *Blocks* then, at most the group's timeout.
///
/// *Throws* `invalid_argument` when the transport cannot be duplicated.
std::shared_ptr<ProcessGroup> companion(const std::shared_ptr<ProcessGroup>& group);

/// Gives `group` a companion that the caller has made. Local; the same on all ranks, before the first
/// `companion(group)`. *Throws* `invalid_argument` when rank or size differ, or `group` has a companion already.
void set_companion(const std::shared_ptr<ProcessGroup>& group, std::shared_ptr<ProcessGroup> companion);

}  // namespace unisono
