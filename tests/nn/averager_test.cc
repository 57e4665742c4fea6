// Averaging parameters instead of gradients.
#include "reducer/ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

std::vector<NamedTensor> named(const torch::nn::Module& module) {
  std::vector<NamedTensor> out;
  for (const auto& p : module.named_parameters()) out.push_back({p.key(), p.value()});
  return out;
}

struct Mixed : torch::nn::Module {
  Tensor f = register_parameter("f", torch::zeros({3, 5}));
  Tensor d = register_parameter("d", torch::zeros({2}, at::kDouble));
  Tensor h = register_parameter("h", torch::zeros({4}, at::kBFloat16));
  Tensor c = register_parameter("c", torch::zeros({2}, at::kComplexFloat));
  Tensor t = register_parameter("t", torch::zeros({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast));
};

TEST(ParameterAverager, EveryPeriodAllDtypesAndLayouts) {
  on_ranks(3, [](auto group) {
    Mixed m;
    ParameterAverager averager(named(m), group, 2, 3);
    for (int step = 1; step <= 6; ++step) {
      for (const auto& p : named(m)) p.tensor.data().fill_(group->rank());
      const bool due = step == 4 || step == 6;
      EXPECT_EQ(averager.step(), due);
      for (const auto& p : named(m)) {
        EXPECT_TRUE(torch::equal(p.tensor.detach(), torch::full_like(p.tensor, due ? 1.0 : group->rank()))) << p.name;
      }
    }
    EXPECT_TRUE(m.t.is_contiguous(at::MemoryFormat::ChannelsLast));
  });
}

TEST(ParameterAverager, FollowsOtherParameters) {
  on_ranks(2, [](auto group) {
    Mixed first, second;
    ParameterAverager averager(named(first), group, 1);
    for (const auto& p : named(second)) p.tensor.data().fill_(2.0 * group->rank());
    averager.follow(named(second));
    averager.step();
    for (const auto& p : named(second)) EXPECT_TRUE(torch::equal(p.tensor, torch::ones_like(p.tensor))) << p.name;
  });
}

TEST(ParameterAverager, RefusesWhatHasNoMean) {
  on_ranks(1, [](auto group) {
    EXPECT_THROW(ParameterAverager({}, group, 0), Error);
    EXPECT_THROW(ParameterAverager({}, group, 1, -1), Error);
    EXPECT_THROW(ParameterAverager({{"count", torch::zeros({1}, at::kLong)}}, group, 1), Error);
  });
}

}  // namespace
}  // namespace unisono
