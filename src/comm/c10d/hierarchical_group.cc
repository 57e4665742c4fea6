#include <unisono/c10d.h>

#include <utility>

#include "comm/c10d/engine.h"
#include "comm/hierarchy/hierarchy_group.h"

namespace unisono {

std::shared_ptr<ProcessGroup> make_hierarchical_group(const HostGroups& groups, std::vector<std::vector<int>> hosts,
                                                      std::shared_ptr<Store> store, bool ordered) {
  const auto engine = [](const auto& group) { return group ? std::make_unique<C10dEngine>(group) : nullptr; };
  HierarchyParts parts;
  parts.flat = engine(groups.all);
  parts.across = engine(groups.across);
  parts.leaders = engine(groups.leaders);
  parts.ordered = ordered;
  return make_hierarchy(layout_of(std::move(hosts), groups.all->getRank()), std::move(parts), std::move(store));
}

}  // namespace unisono
