#pragma once

#include <unisono/distributed_data_parallel.h>
#include <unisono/process_group.h>

#include <vector>

#include "reducer/bucket_plan.h"

namespace unisono {

/// Which tensors travel together: messages of about 25 MiB per device, so that many small tensors cost few of them.
/// Messages of dtype u8 are one rank's bytes; all others are averaged. A description of shapes only: it outlives the
/// tensors.
std::vector<BucketSpec> plan_state(const std::vector<NamedTensor>& tensors, BufferPolicy policy);

/// *Collective*. *Blocks*. Brings the tensors of all ranks to one state; a tensor whose bits stay is not written.
/// Returns false when some rank withheld the first message: then nothing was written anywhere.
bool exchange_state(const std::vector<NamedTensor>& tensors, const std::vector<BucketSpec>& plan, int root,
                    ProcessGroup& group, const char* what);

/// *Collective*, in the place of `exchange_state` on the other ranks: this rank's tensors are no longer those of
/// `plan`.
void withhold_state(const std::vector<BucketSpec>& plan, int root, ProcessGroup& group, const char* what);

/// *Collective*. *Blocks*. Gives every rank the values of `root`.
void broadcast_state(const std::vector<NamedTensor>& tensors, int root, ProcessGroup& group, const char* what);

}  // namespace unisono
