// A wrapper that goes on with another group.
#include <unisono/regroup.h>

#include "reducer/ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;

double step(DistributedDataParallel<torch::nn::LinearImpl>& ddp, Fix& fix) {
  fix.model->zero_grad();
  ddp(fix.x).sum().backward();
  return fix.grad();
}

TEST(SetGroup, AveragesOverTheNewRanks) {
  on_ranks(3, [](auto group) {
    Fix fix(group);
    DistributedDataParallel ddp(fix.model.ptr(), group);
    EXPECT_EQ(step(ddp, fix), 2.0);  // of 1, 2 and 3
    if (group->rank() == 2) return;
    ddp.set_group(without(group, {2}));
    EXPECT_FALSE(fix.model->weight.grad().defined());
    EXPECT_EQ(step(ddp, fix), 1.5);
    EXPECT_EQ(step(ddp, fix), 1.5);
  });
}

// Whoever has drifted meanwhile gets rank 0's values, as at construction.
TEST(SetGroup, BringsRankZerosParameters) {
  on_ranks(2, [](auto group) {
    Fix fix(group);
    DistributedDataParallel ddp(fix.model.ptr(), group);
    const torch::NoGradGuard no_grad;
    fix.model->weight.fill_(group->rank() + 5.0);
    ddp.set_group(without(group, {}));
    EXPECT_TRUE(same_bits(fix.model->weight, torch::full({1, 4}, 5.0)));
  });
}

TEST(SetGroup, WithoutAGroupIsRefusedAndNothingChanges) {
  on_ranks(2, [](auto group) {
    Fix fix(group);
    DistributedDataParallel ddp(fix.model.ptr(), group);
    EXPECT_THROW(ddp.set_group(nullptr), Error);
    EXPECT_EQ(step(ddp, fix), 1.5);
  });
}

// After a failure: one throws in the middle, the others' call fails, and those that are left go on.
TEST(SetGroup, GoesOnAfterAFailure) {
  on_ranks(3, [](auto group) {
    Fix fix(group);
    DistributedDataParallel ddp(fix.model.ptr(), group);
    if (group->rank() == 1) return group->abort(Error(ErrorCode::peer_lost, "rank 1 gives up"));
    EXPECT_THROW(step(ddp, fix), std::exception);
    ddp.set_group(without(group, {1}));
    EXPECT_EQ(step(ddp, fix), 2.0);  // of 1 and 3
  });
}

// A module on the stack, whose layers are walked all the same.
struct Normed : torch::nn::Module {
  explicit Normed(const std::shared_ptr<ProcessGroup>& group)
      : layer(register_module("layer", torch::nn::Linear(4, 2))),
        norm(register_module("norm", SyncBatchNorm(torch::nn::BatchNormOptions(2), group))) {}
  torch::Tensor forward(const torch::Tensor& x) { return norm(layer(x)); }
  torch::nn::Linear layer;
  SyncBatchNorm norm;
};

TEST(SetGroup, LayersOverTheOldGroupGoAlong) {
  on_ranks(3, [](auto group) {
    Normed module(group);
    DistributedDataParallel ddp(module, group);
    if (group->rank() == 1) return group->abort(Error(ErrorCode::peer_lost, "rank 1 gives up"));
    const auto rest = without(group, {1});
    ddp.set_group(rest);
    EXPECT_EQ(module.norm->group(), rest);
    ddp(torch::randn({3, 4})).sum().backward();
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

// What the module has now, not what it had when it was wrapped.
TEST(SetGroup, BringsWhatTookAnothersPlace) {
  on_ranks(2, [](auto group) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 1));
    DistributedDataParallel ddp(net, group);
    ddp(torch::ones({1, 4})).sum().backward();
    net->replace_module("1", torch::nn::Linear(4, 1));
    const torch::NoGradGuard no_grad;
    net->parameters()[2].fill_(group->rank() + 7.0);
    EXPECT_FALSE(ddp.replicas_identical());
    ddp.set_group(without(group, {}));
    EXPECT_TRUE(same_bits(net->parameters()[2], torch::full({1, 4}, 7.0)));
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

}  // namespace
}  // namespace unisono
