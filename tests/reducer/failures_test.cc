// Backwards that do not end well.
#include <latch>

#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, bool armed) {
    ctx->saved_data["armed"] = armed;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (ctx->saved_data["armed"].toBool()) throw std::runtime_error("the user's own error");
    return {grads[0], Tensor()};
  }
};

struct Deep : torch::nn::Module {
  std::vector<torch::nn::Linear> layers;
  Deep() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false))));
      at::NoGradGuard no_grad;
      layers.back()->weight.copy_(torch::eye(4));
    }
  }
  Tensor forward(Tensor x, int fail_at) {
    for (int i = 0; i < 4; ++i) x = ThrowInBackward::apply(layers[static_cast<std::size_t>(i)](x), i == fail_at);
    return x;
  }
};

// Rank 1 throws in the middle, at every depth: the others hear of it, nobody waits for a deadline, a retry works.
TEST(Failures, AbandonedBackwardIsToldAndRetried) {
  for (double cap : {0.0, 0.00005, 25.0}) {
    std::vector<std::string> told(3);
    on_ranks(3, [&](auto group) {
      auto model = std::make_shared<Deep>();
      DistributedDataParallel ddp(model, group, {.bucket_cap_mb = cap});
      const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
      std::int64_t step = 0;
      for (int fail_at = 2; fail_at >= 0; --fail_at) {
        std::string error;
        try {
          ddp(x, group->rank() == 1 ? fail_at : -1).sum().backward();
        } catch (const std::exception& e) {
          error = e.what();
        }
        const std::string wanted = group->rank() == 1 ? "the user's own error"
                                                      : "rank 1 threw in its backward of step " + std::to_string(step);
        EXPECT_NE(error.find(wanted), std::string::npos) << error;
        told[static_cast<std::size_t>(group->rank())] += error;
        ++step;
        model->zero_grad();
        ddp(x, -1).sum().backward();
        ++step;
        for (const auto& p : model->parameters()) EXPECT_EQ(p.grad()[0][0].template item<float>(), 2.0f);
        model->zero_grad();
      }
    });
    EXPECT_EQ(told[0], told[2]);
  }
}

TEST(Failures, EveryRankAbandons) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<Deep>();
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    EXPECT_THROW(ddp(x, 1).sum().backward(), std::exception);
    model->zero_grad();
    ddp(x, -1).sum().backward();
    EXPECT_EQ(model->parameters()[0].grad()[0][0].template item<float>(), 1.5f);
  });
}

TEST(Failures, AbandonedUnderNoSyncSendsNothing) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<Deep>();
    DistributedDataParallel ddp(model, group);
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    if (group->rank() == 0) {
      auto skip = ddp.no_sync();
      EXPECT_THROW(ddp(x, 1).sum().backward(), std::exception);
      model->zero_grad();
    }
    ddp(x, -1).sum().backward();
    EXPECT_EQ(model->parameters()[0].grad()[0][0].template item<float>(), 1.5f);
  });
}

// A7: a rank that skips its backward is named, with the step and the bucket.
TEST(Failures, ARankThatSkipsBackwardIsNamed) {
  const auto skipping = [](int world, int good_steps, const DistributedDataParallelOptions& options) {
    std::latch gave_up(world - 1);
    const auto failures = failures_of(
        world,
        [&](auto group) {
          const bool skips = group->rank() == 1;
          try {
            auto model = std::make_shared<Deep>();
            DistributedDataParallel ddp(model, group, options);
            const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
            for (int step = 0; step < good_steps; ++step) ddp(x, -1).sum().backward();
            if (skips) return gave_up.wait();  // alive, but elsewhere
            ddp(x, -1).sum().backward();
          } catch (...) {
            if (!skips) gave_up.count_down();
            throw;
          }
          gave_up.count_down();
        },
        1s);
    for (int rank = 0; rank < world; ++rank) {
      const std::string& failure = failures[static_cast<std::size_t>(rank)];
      if (rank == 1) {
        EXPECT_EQ(failure, "");
        continue;
      }
      for (const std::string& part : {std::string("rank 1"), std::string("has not entered"), std::string("bucket 0"),
                                      "step " + std::to_string(good_steps)}) {
        EXPECT_NE(failure.find(part), std::string::npos) << "rank " << rank << ": " << failure;
      }
    }
  };
  skipping(2, 1, {});
  skipping(3, 1, {.bucket_cap_mb = 0});
  skipping(3, 2,
           {.bucket_cap_mb = 0});  // the buckets' order is agreed on in step 1: here the first bucket itself is missed
}

}  // namespace
}  // namespace unisono
