#pragma once

#include <memory>

#include <c10/util/intrusive_ptr.h>

#include <unisono/make_group.h>
#include <unisono/process_group.h>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace unisono {

/// Any torch.distributed group (Gloo, NCCL, MPI, UCC, ...) behind unisono's contract. A group whose CPU backend is unisono's
/// own is taken apart again: the transport under it is returned, so that buckets are reduced in place.
///
/// Every call first gathers a small header from all ranks (fingerprint and control record); where ranks differ, no data
/// moves and all of them fail with the same text. Calls are issued by one thread of the group ("uni-c10d") in the order
/// they were made. What the engine lacks is built here: `avg` is a sum that is divided, f16 and bf16 are reduced in f32,
/// bool in u8. The order of summation is the engine's, not the balanced tree of our own transports.
///
/// *Threads*: while the group lives, nobody else may issue collectives on `group` that are not ordered with ours.
std::shared_ptr<ProcessGroup> make_c10d_group(c10::intrusive_ptr<c10d::ProcessGroup> group);

/// A c10d store (TCPStore, FileStore, HashStore, PrefixStore) behind unisono's `Store`; keeps it alive.
std::shared_ptr<Store> make_store(c10::intrusive_ptr<c10d::Store> store);

}  // namespace unisono
