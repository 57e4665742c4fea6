#pragma once

#include <unisono/distributed_data_parallel.h>
#include <unisono/process_group.h>

#include <string>
#include <vector>

namespace unisono {

/// What all ranks must agree on before they train together, one line per entry: options, then every parameter and
/// buffer with its name, shape, dtype, strides and requires_grad, in order.
std::vector<std::string> describe_model(const std::vector<NamedTensor>& parameters,
                                        const std::vector<NamedTensor>& buffers,
                                        const DistributedDataParallelOptions& options);

/// *Collective*. *Blocks*. *Throws* `mismatch` naming the first entry that differs and both sides, the same text on all
/// ranks. `what`: the name of its messages, for ranks that do not come and call something else.
void require_same_model(const std::vector<std::string>& entries, ProcessGroup& group,
                        const char* what = "model digest");

/// The name of the messages that follow a change of `parameter`, for as long as the process lives: errors may tell it
/// late.
const char* name_of_change(const std::string& parameter);

/// *Collective*. *Blocks*. What `require_same_model` does, for any list of things that ranks must agree on. `whose` is
/// its name in the error ("modules"), `advice` the last sentence; `extra` lines at the front are not tensors.
void require_same_entries(const std::vector<std::string>& entries, ProcessGroup& group, const std::string& whose,
                          const std::string& advice, std::size_t extra = 0);

/// SHA-256 over the bits of the tensors, in order.
std::string digest_of(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers);

/// *Collective*. *Blocks*. Every rank's `text`, in rank order; texts may differ in length.
std::vector<std::string> gather_texts(const std::string& text, ProcessGroup& group, const char* what);

}  // namespace unisono
