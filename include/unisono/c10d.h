#pragma once

#include <memory>
#include <optional>

#include <c10/util/intrusive_ptr.h>

#include <unisono/init.h>
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

/// `make_c10d_group(group)` whose reductions of CPU memory are ours: an all_to_all of slices, the sum in the balanced binary tree over
/// ranks, an all_gather. The same bits as in shared memory, whatever the engine, the topology, the size of messages; as many bytes as a
/// ring's. `group` must be this group's alone.
std::shared_ptr<ProcessGroup> make_ordered_group(c10::intrusive_ptr<c10d::ProcessGroup> group);

/// Which ranks of a group share a host, as one of them sees it; hosts in any order, the same on all ranks.
struct HostPlace {
  int hosts = 1;
  int local_rank = 0;  ///< among the ranks of this host, in the order of their ranks
  int local_size = 1;
  int carriers = 1;  ///< ranks per host that send to other hosts: the number of ranks of the smallest
};

/// `make_c10d_group(group)` whose all-reduces of CPU memory go in two levels: in shared memory inside a host, over `across` between
/// hosts, each of a host's first `carriers` ranks carrying a slice. What leaves a host is 2 (H - 1) / H of a message for H hosts,
/// whatever the number of its ranks. Everything else goes over `group`.
/// `across`: the carriers with this rank's local number, one of each host; null on a rank that is no carrier. `store` is where the ranks
/// of this host meet: no other host's may use the same keys.
/// *Collective*. *Blocks*. *Throws* `invalid_argument` when the local ranks cannot share memory.
std::shared_ptr<ProcessGroup> make_hierarchical_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      c10::intrusive_ptr<c10d::ProcessGroup> across, const HostPlace& place,
                                                      std::shared_ptr<Store> store);

/// Where the ranks of a run over several hosts meet, for who makes the group of their choice there.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;  ///< its keys are this run's alone
  int rank = 0;
  int size = 1;
};
/// What `init(options)` would use: nothing when the environment tells of one host, unless `options.transport` is "gloo".
/// *Collective*. *Blocks* and *throws* as `init` does.
std::optional<Meeting> meet_over_hosts(const InitOptions& options);

/// A c10d store (TCPStore, FileStore, HashStore, PrefixStore) behind unisono's `Store`; keeps it alive.
std::shared_ptr<Store> make_store(c10::intrusive_ptr<c10d::Store> store);
/// What `make_store` was given. *Throws* `invalid_argument` for a store that did not come from there.
c10::intrusive_ptr<c10d::Store> torch_store(const Store& store);

}  // namespace unisono
