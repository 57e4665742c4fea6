#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d/engine.h"
#include "comm/c10d/engines/gloo.h"
#include "comm/c10d/store_for_torch.h"
#include "comm/contract.h"
#include "comm/hierarchy_phases.h"
#include "comm/issuer/issued_group.h"

// Two levels with Gloo itself between the hosts.

namespace unisono::testing {
namespace {

std::unique_ptr<Engine> gloo_among(const char*, const GroupOptions& options) {
  setenv("GLOO_SOCKET_IFNAME", "lo", 0);
  const auto store = c10::make_intrusive<c10d::PrefixStore>(options.prefix, store_for_torch(options.store));
  const auto timeout = std::chrono::ceil<std::chrono::milliseconds>(options.timeout);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, options.rank, options.size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::GLOO, start_gloo({store, options.rank, options.size, timeout}));
  group->setDefaultBackend(c10d::ProcessGroup::GLOO);
  return std::make_unique<C10dEngine>(std::move(group));
}

// Pairs of ranks; numbers that are exact in any order, for between three hosts the order is Gloo's.
const Transport kHosts = {
    .name = "hierarchy_gloo",
    .max_ranks = 5,
    .world = [](int, std::chrono::nanoseconds) -> Maker {
      return [](const GroupOptions& options) -> std::shared_ptr<ProcessGroup> {
        if (options.size == 1) return make_group("serial", options);
        return std::make_shared<IssuedGroup>(make_emulated_hosts(hosts_of(options.size), options, gloo_among));
      };
    },
    .processes = true,
    .mixes_places = false,
    .numbers = Numbers::small,
};

std::vector<Transport> where_built() {
  if (why_no_gloo().empty()) return {kHosts};
  std::cout << "the contract in two levels over gloo is left out: " << why_no_gloo() << '\n';
  return {};
}

INSTANTIATE_TEST_SUITE_P(HierarchyOverGloo, Contract, ::testing::ValuesIn(where_built()));
[[maybe_unused]] const bool kRegistered = [] {
  register_for_processes(kHosts);
  return true;
}();

// Gloo says that a connection was lost, and not whose it was.
const PhasesOfDeath kPhases("gloo", gloo_among);

class HierarchyDeathOverGloo : public ::testing::TestWithParam<std::string> {};

TEST_P(HierarchyDeathOverGloo, IsAnErrorOnAllOthersThatNamesTheRank) {
  if (!why_no_gloo().empty()) GTEST_SKIP() << why_no_gloo();
  for (const int victim : {1, 2}) {
    if (victim == 1 && GetParam() == "headers_back") continue;  // it leads no host
    kPhases.run(GetParam(), victim);
  }
}

INSTANTIATE_TEST_SUITE_P(Phases, HierarchyDeathOverGloo, ::testing::ValuesIn(PhasesOfDeath::all()));

}  // namespace
}  // namespace unisono::testing
