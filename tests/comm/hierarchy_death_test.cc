#include <gtest/gtest.h>

#include "comm/hierarchy_phases.h"

namespace unisono::testing {
namespace {

const PhasesOfDeath kPhases("shm", shared_memory_among);

class HierarchyDeath : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(HierarchyDeath, IsAnErrorOnAllOthersThatNamesTheRank) {
  const auto& [phase, victim] = GetParam();
  kPhases.run(phase, victim);
}

// Rank 1 leads no host; rank 2 does.
INSTANTIATE_TEST_SUITE_P(Plain, HierarchyDeath,
                         ::testing::Combine(::testing::Values("headers", "data", "collect", "across", "across_back"),
                                            ::testing::Values(1)));
INSTANTIATE_TEST_SUITE_P(Leader, HierarchyDeath,
                         ::testing::Combine(::testing::ValuesIn(PhasesOfDeath::all()), ::testing::Values(2)));

}  // namespace
}  // namespace unisono::testing
