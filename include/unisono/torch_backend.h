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

/// What `torch.distributed` calls to create the backend "unisono": `make_group("auto")` over torch's store, which is kept
/// alive as long as the backend. *Collective*. *Blocks*.
c10::intrusive_ptr<c10d::Backend> create_torch_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                       std::chrono::milliseconds timeout);

}  // namespace unisono
