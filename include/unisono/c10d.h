#pragma once

#include <c10/util/intrusive_ptr.h>
#include <unisono/init.h>
#include <unisono/make_group.h>
#include <unisono/process_group.h>

#include <memory>
#include <optional>
#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace unisono {

/// Any torch.distributed group (Gloo, NCCL, MPI, UCC, ...) behind unisono's contract. A group whose only backend is
/// unisono's own is taken apart again: the transport under it is returned, so that buckets are reduced in place.
///
/// Every call first gathers a small header from all ranks (fingerprint and control record); where ranks differ, no data
/// moves and all of them fail with the same text. Calls are issued by one thread of the group ("uni-c10d") in the order
/// they were made. What the engine lacks is built here: `avg` is a sum that is divided, f16 and bf16 are reduced in
/// f32, bool in u8. The order of summation is the engine's, not the balanced tree of our own transports.
///
/// *Threads*: while the group lives, nobody else may issue collectives on `group` that are not ordered with ours.
std::shared_ptr<ProcessGroup> make_c10d_group(c10::intrusive_ptr<c10d::ProcessGroup> group);

/// `make_c10d_group(group)` whose reductions of CPU memory are ours: an all_to_all of slices, the sum in the balanced
/// binary tree over ranks, an all_gather. The same bits as in shared memory, whatever the engine, the topology, the
/// size of messages; as many bytes as a ring's. `group` must be this group's alone.
std::shared_ptr<ProcessGroup> make_ordered_group(c10::intrusive_ptr<c10d::ProcessGroup> group);

/// What connects the hosts of a hierarchy.
struct HostGroups {
  c10::intrusive_ptr<c10d::ProcessGroup> all;  ///< every rank
  /// As many ranks of each host carry as the smallest has, its first ones: those with this rank's place, one per host,
  /// in the order of their ranks; null on a rank that does not carry.
  c10::intrusive_ptr<c10d::ProcessGroup> across;
  c10::intrusive_ptr<c10d::ProcessGroup> leaders;  ///< the first ranks of the hosts; null on every other
};

/// `make_c10d_group(groups.all)` whose calls on CPU memory, all but all_to_all, go in two levels: in shared memory
/// inside a host, over `across` between hosts, each carrier with a slice. What leaves a host in an all-reduce is
/// 2 (H - 1) / H of a message for H hosts, whatever the number of its ranks. Short messages take one message between
/// hosts.
/// `hosts`: the ranks of each, as find_hosts() gives them. `store` is where the ranks of this host meet: no other
/// host's may use the same keys. `ordered`: 16-bit sums are rounded once whatever the calls allow, so that with two
/// hosts, each a subtree of the balanced tree over ranks (ranks 0 to 3 on one, 4 to 7 on the other), the bits are those
/// of shared memory alone. *Collective*. *Blocks*. *Throws* `invalid_argument` when the ranks of a host cannot share
/// memory, or groups and hosts do not fit.
std::shared_ptr<ProcessGroup> make_hierarchical_group(const HostGroups& groups, std::vector<std::vector<int>> hosts,
                                                      std::shared_ptr<Store> store, bool ordered = false);

/// Where the ranks of a run over several hosts meet, for who makes the group of their choice there.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;  ///< its keys are this run's alone
  int rank = 0;
  int size = 1;
};
/// What `init(options)` would use: nothing when the environment tells of one host, unless `options.transport` is
/// "gloo". *Collective*. *Blocks* and *throws* as `init` does.
std::optional<Meeting> meet_over_hosts(const InitOptions& options);

/// A c10d store (TCPStore, FileStore, HashStore, PrefixStore) behind unisono's `Store`; keeps it alive.
std::shared_ptr<Store> make_store(c10::intrusive_ptr<c10d::Store> store);
/// What `make_store` was given. *Throws* `invalid_argument` for a store that did not come from there.
c10::intrusive_ptr<c10d::Store> torch_store(const Store& store);

}  // namespace unisono
