#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/hierarchy/hierarchy_group.h"

namespace unisono::testing {

/// Neighbours share a host: `first` ranks the first, two each other (or what is left). Where that would leave no second
/// host, the first is smaller, for there would be nothing between hosts.
std::vector<std::vector<int>> hosts_of(int size, int first = 2);

/// What is between hosts: the engine of the ranks that have `options` in common but for their rank. `part`: "all",
/// "across", "leaders".
using EngineAmong = std::function<std::unique_ptr<Engine>(const char* part, const GroupOptions& options)>;
/// Shared memory once more.
std::unique_ptr<Engine> shared_memory_among(const char* part, const GroupOptions& options);

/// The engine of a hierarchy of hosts that are none. The ranks of all hosts meet in `options.store`.
std::unique_ptr<Engine> make_emulated_hosts(const std::vector<std::vector<int>>& hosts, const GroupOptions& options,
                                            const EngineAmong& among = shared_memory_among);

}  // namespace unisono::testing
