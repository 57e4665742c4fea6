#pragma once

#include <chrono>
#include <memory>

#include <c10/util/intrusive_ptr.h>

#include <unisono/process_group.h>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace unisono {

/// A unisono group as a backend of torch.distributed, for CPU tensors: all-reduce, broadcast, all-gather, reduce-scatter,
/// reduce, gather, scatter, all-to-all with equal blocks, barrier. Other operations throw `invalid_argument` with their name.
c10::intrusive_ptr<c10d::Backend> make_torch_backend(std::shared_ptr<ProcessGroup> group);

/// The group that `torch.distributed` gets for its backend "unisono": `make_group("auto")` over one of torch's stores, which is
/// kept alive as long as the group. *Collective*. *Blocks*. `timeout` is the group's, and that of the start.
std::shared_ptr<ProcessGroup> make_group_on_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  std::chrono::duration<double> timeout);

}  // namespace unisono
