#include <unisono/round_robin.h>

#include "comm/contract.h"
#include "comm/fake/fake_group.h"
#include "comm/shm/shm_group.h"

namespace unisono::testing {
namespace {

Transport over_shm(int groups, int max_ranks) {
  return {
      .name = "round_robin_of_" + std::to_string(groups) + "_shm",
      .max_ranks = max_ranks,
      .world = [groups](int, std::chrono::nanoseconds) -> Maker {
        return [groups](GroupOptions options) {
          const std::string prefix = options.prefix;
          std::vector<std::shared_ptr<ProcessGroup>> all;
          for (int g = 0; g < groups; ++g) {
            options.prefix = prefix + "/" + std::to_string(g);
            all.push_back(make_shm_group(options));
          }
          return make_round_robin_group(std::move(all));
        };
      },
      .processes = true,
      .mixes_places = groups == 1,
  };
}

const Transport kOneShm = over_shm(1, 3);
const Transport kThreeShm = over_shm(3, 5);

const Transport kFakes = {
    .name = "round_robin_of_2_fake",
    .max_ranks = 3,
    .world = [](int size, std::chrono::nanoseconds timeout) -> Maker {
      std::vector<std::shared_ptr<FakeWorld>> worlds = {std::make_shared<FakeWorld>(size, timeout),
                                                        std::make_shared<FakeWorld>(size, timeout)};
      return [worlds](const GroupOptions& options) {
        std::vector<std::shared_ptr<ProcessGroup>> all;
        for (const auto& world : worlds) all.push_back(world->group(options.rank));
        return make_round_robin_group(std::move(all));
      };
    },
    .mixes_places = false,
};

UNISONO_INSTANTIATE_CONTRACT(RoundRobinOfOneShm, kOneShm);
UNISONO_INSTANTIATE_CONTRACT(RoundRobinOfThreeShm, kThreeShm);
UNISONO_INSTANTIATE_CONTRACT(RoundRobinOfFakes, kFakes);

}  // namespace
}  // namespace unisono::testing
