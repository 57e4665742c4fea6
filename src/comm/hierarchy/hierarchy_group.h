#pragma once

#include <unisono/make_group.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/hierarchy/hierarchy_engine.h"

namespace unisono {

/// A hierarchy over these engines. Makes the shared-memory groups of the host's ranks, who meet in `store`: no other
/// host's may use the same keys. Ranks of the same host: *collective*, *blocks*. *Throws* as `make_group` does, and as
/// HierarchyEngine's constructor.
std::unique_ptr<Engine> make_hierarchy_engine(HostLayout layout, HierarchyParts parts, std::shared_ptr<Store> store);
/// Its group.
std::shared_ptr<ProcessGroup> make_hierarchy(HostLayout layout, HierarchyParts parts, std::shared_ptr<Store> store);

/// The engine of these ranks, which ascend and are numbered in that order, given on each of them; null on every other.
/// Asked for the same in the same order on all ranks.
using MakeEngine = std::function<std::unique_ptr<Engine>(const std::string& name, const std::vector<int>& ranks)>;
/// The store in which the ranks of a host meet, under a name that is no other host's, and no other run's; `first`: of
/// the host's ranks.
using OpenHostStore = std::function<std::shared_ptr<Store>(const std::string& name, bool first)>;

/// Finds out which ranks share a host and makes the group that suits: a hierarchy, or `flat` alone where each rank has
/// a host of its own or all have the same. *Collective*, *blocks*. *Throws* as `find_hosts`, `make_hierarchy` and what
/// is given.
std::shared_ptr<ProcessGroup> make_over_hosts(std::unique_ptr<Engine> flat, const MakeEngine& make,
                                              const OpenHostStore& open, std::chrono::nanoseconds timeout);

}  // namespace unisono
