#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/hierarchy/hierarchy_group.h"

namespace unisono::testing {

/// What a test puts around a part of a hierarchy before it is used.
struct HostHooks {
  std::function<std::unique_ptr<Engine>(std::unique_ptr<Engine>, const char* part)> engine = nullptr;
};

/// A hierarchy of hosts that are none: what is between them is shared memory once more. The ranks of all hosts meet in `options.store`.
std::shared_ptr<ProcessGroup> make_emulated_hosts(const std::vector<std::vector<int>>& hosts, const GroupOptions& options,
                                                  const HostHooks& hooks = {});

}  // namespace unisono::testing
