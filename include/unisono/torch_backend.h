#pragma once

#include <c10/util/intrusive_ptr.h>
#include <unisono/process_group.h>

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace unisono {

/// A unisono group as a backend of torch.distributed, for CPU tensors: all of its collectives, barrier, send, recv
/// (from any rank too). Messages between two ranks, and blocks of different sizes in all-to-all, go by the group's
/// transport where that can (shared memory), else by `beside`, another backend of the same ranks that nobody else uses.
/// *Throws* `invalid_argument` in a call that has neither.
c10::intrusive_ptr<c10d::Backend> make_torch_backend(std::shared_ptr<ProcessGroup> group,
                                                     c10::intrusive_ptr<c10d::Backend> beside = {});

/// The group that `torch.distributed` gets for its backend "unisono": `make_group("auto")` over one of torch's stores,
/// which is kept alive as long as the group. *Collective*. *Blocks*. `timeout` is the group's, and that of the start.
std::shared_ptr<ProcessGroup> make_group_on_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  std::chrono::duration<double> timeout);

}  // namespace unisono
