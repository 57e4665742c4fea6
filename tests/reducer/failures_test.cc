// Backwards that do not end well.
#include <future>

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
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false))));
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
        ++step;
        model->zero_grad();
        ddp(x, -1).sum().backward();
        ++step;
        for (const auto& p : model->parameters()) EXPECT_EQ(p.grad()[0][0].template item<float>(), 2.0f);
        model->zero_grad();
      }
    });
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
  std::promise<void> gave_up;
  const auto failures = failures_of(
      2,
      [&](auto group) {
        Fix f(group);
        DistributedDataParallel ddp(f.model, group);
        ddp(f.x).sum().backward();
        if (group->rank() == 1) return gave_up.get_future().wait();  // alive, but elsewhere
        try {
          ddp(f.x).sum().backward();
        } catch (...) {
          gave_up.set_value();
          throw;
        }
        gave_up.set_value();
      },
      1s);
  for (const char* part : {"rank 1", "step 1", "bucket 0"}) {
    EXPECT_NE(failures[0].find(part), std::string::npos) << failures[0];
  }
}

}  // namespace
}  // namespace unisono
