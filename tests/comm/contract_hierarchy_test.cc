#include "comm/contract.h"
#include "comm/emulated_hosts.h"
#include "comm/issuer/issued_group.h"

namespace unisono::testing {
namespace {

// The layouts here are those in which hosts are subtrees of the balanced tree, so that sums have the reference's bits.
Transport hosts(const std::string& name, int first) {
  return {
      .name = name,
      .max_ranks = 5,
      .world = [first](int, std::chrono::nanoseconds) -> Maker {
        return [first](const GroupOptions& options) -> std::shared_ptr<ProcessGroup> {
          if (options.size == 1) return make_group("serial", options);
          return std::make_shared<IssuedGroup>(make_emulated_hosts(hosts_of(options.size, first), options));
        };
      },
      .processes = true,
      .mixes_places = false,
  };
}

const Transport kPairs = hosts("hierarchy", 2);
const Transport kUneven = hosts("hierarchy_uneven", 4);

// Ranks 0, 3, 4 and 1, 2: the carriers of one place are not in the order of the hosts. Their sums are another tree's.
const Transport kCrossed = {
    .name = "hierarchy_crossed",
    .max_ranks = 5,
    .world = [](int, std::chrono::nanoseconds) -> Maker {
      return [](const GroupOptions& options) -> std::shared_ptr<ProcessGroup> {
        if (options.size == 1) return make_group("serial", options);
        std::vector<std::vector<int>> hosts(2);
        for (int rank = 0; rank < options.size; ++rank) hosts[rank == 1 || rank == 2 ? 1 : 0].push_back(rank);
        return std::make_shared<IssuedGroup>(make_emulated_hosts(hosts, options));
      };
    },
    .mixes_places = false,
    .numbers = Numbers::small,
};

UNISONO_INSTANTIATE_CONTRACT(HierarchyCrossed, kCrossed);
UNISONO_INSTANTIATE_CONTRACT(Hierarchy, kPairs);
UNISONO_INSTANTIATE_CONTRACT(HierarchyUneven, kUneven);

}  // namespace
}  // namespace unisono::testing
