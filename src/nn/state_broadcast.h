#pragma once

#include <vector>

#include <unisono/distributed_data_parallel.h>
#include <unisono/process_group.h>

namespace unisono {

/// *Collective*. *Blocks*. Gives every rank the values of `root`: tensors are packed into messages of about 25 MiB per device, so that a model of many small tensors costs few messages.
void broadcast_state(const std::vector<NamedTensor>& tensors, int root, ProcessGroup& group, const char* what);

}  // namespace unisono
