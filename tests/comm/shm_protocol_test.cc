#include <gtest/gtest.h>

#include "comm/shm_protocol_model.h"

namespace unisono::testing {
namespace {

using namespace model;

std::vector<Scenario> all_scenarios(int ranks, Mutant mutant) {
  std::vector<Scenario> out;
  const Kind kinds[] = {Kind::small, Kind::staged, Kind::in_place};
  for (const int slots : {1, 2}) {
    for (const Kind first : kinds) {
      for (const Kind second : kinds) {
        for (const bool deadlines : {false, true}) {
          out.push_back({ranks, slots, {first, second}, deadlines, 1, false, mutant});
          out.push_back({ranks, slots, {first, second}, deadlines, 0, true, mutant});
        }
      }
    }
  }
  return out;
}

std::string describe(const Scenario& s) {
  return std::to_string(s.ranks) + " ranks, " + std::to_string(s.slots) + " slots, kinds " +
         std::to_string(static_cast<int>(s.kinds[0])) + std::to_string(static_cast<int>(s.kinds[1])) +
         (s.deadlines ? ", deadlines" : "") + (s.threads ? ", threads" : "");
}

TEST(ShmProtocol, HoldsInEveryInterleaving) {
  std::size_t states = 0;
  for (const int ranks : {2, 3}) {
    for (const Scenario& scenario : all_scenarios(ranks, Mutant::none)) {
      const Report report = explore(scenario);
      EXPECT_EQ(report.violation, "") << describe(scenario);
      states += report.states;
    }
  }
  EXPECT_GT(states, 10'000u);
  RecordProperty("states", static_cast<int>(states));
}

TEST(ShmProtocol, EveryMutantIsFound) {
  const Mutant mutants[] = {Mutant::withdraw_without_compare,
                            Mutant::finish_not_awaited,
                            Mutant::memory_left_behind,
                            Mutant::slot_not_awaited,
                            Mutant::predecessor_not_awaited,
                            Mutant::done_before_writing,
                            Mutant::carries_on_behind_a_withdrawn_call};
  for (const Mutant mutant : mutants) {
    bool found = false;
    for (const int ranks : {2, 3}) {
      for (const Scenario& scenario : all_scenarios(ranks, mutant))
        found = found || !explore(scenario).violation.empty();
    }
    EXPECT_TRUE(found) << "mutant " << static_cast<int>(mutant);
  }
}

}  // namespace
}  // namespace unisono::testing
