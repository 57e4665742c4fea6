#pragma once

#include <unisono/make_group.h>
#include <unisono/process_group.h>

#include <chrono>
#include <memory>
#include <vector>

namespace unisono {

/// The ranks of `group` but for `ranks`, as a new group: rank 0 is the first of those that stay, and so on in the old
/// order. It works on a group that has failed, which is what it is for; `ranks` may be empty then. A rank that dies
/// meanwhile is missing: name it too and call again. The old group is left as it is.
///
/// Serves groups in shared memory from `make_group`, `init` and `make_group_on_store`, worlds of one, and round robins
/// of them; not groups between hosts. They meet in the group's own store, which must still answer: the process that
/// hosts it must not be among those lost (see docs/running.md).
///
/// *Collective* over those that stay. *Blocks*, at most `start_timeout`.
/// *Throws* `invalid_argument` for a rank that the group does not have, on a rank that is in `ranks` itself, and for a
/// group without a store; `mismatch` when others name other ranks, with both sides; `timeout` naming the missing ranks;
/// `peer_lost` when the store is gone.
std::shared_ptr<ProcessGroup> without(const std::shared_ptr<ProcessGroup>& group, std::vector<int> ranks,
                                      std::chrono::nanoseconds start_timeout = std::chrono::minutes(5));

/// The ranks of `group` that are gone: their process has ended, or they have destroyed their group. What this rank sees
/// at this moment: others may see more a moment later. Local. *Throws* `invalid_argument` for groups that `without`
/// does not serve.
std::vector<int> lost_ranks(const ProcessGroup& group);

/// The store in which the ranks of `group` met: for `init` or `make_group` with another prefix and more ranks. Null
/// when it has none.
std::shared_ptr<Store> store_of(const ProcessGroup& group);

}  // namespace unisono
