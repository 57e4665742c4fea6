// What accumulates, what is averaged when, and by which denominator.
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

// Registered last layer first: gradients come in another order than the first plan expects.
struct UsedInReverse : torch::nn::Module {
  torch::nn::Linear c = layer("c", 1), b = layer("b", 4), a = layer("a", 4);
  torch::nn::Linear layer(const char* name, int out) {
    auto made = register_module(name, torch::nn::Linear(torch::nn::LinearOptions(4, out).bias(false)));
    at::NoGradGuard no_grad;
    made->weight.fill_(0.5);
    return made;
  }
  Tensor forward(const Tensor& x) { return c(b(a(x))); }
};

// C4: the buckets are rebuilt under gradients that live on.
TEST(Accumulation, SurvivesARebuildWithoutZeroGrad) {
  for (bool views : {true, false}) {
    for (double cap : {0.0, 20.0 / (1 << 20), 25.0}) {
      on_ranks(2, [&](auto group) {
        auto model = std::make_shared<UsedInReverse>();
        DistributedDataParallel ddp(model, group, {.bucket_cap_mb = cap, .gradient_as_bucket_view = views});
        const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
        for (int step = 1; step <= 3; ++step) {
          ddp(x).sum().backward();
          EXPECT_EQ(ddp.last_step().rebuilds, step == 1 ? 0 : 1) << "cap " << cap << " step " << step;
          EXPECT_TRUE(same_bits(model->a->weight.grad(), torch::full({4, 4}, 1.5f * step))) << "cap " << cap;
          EXPECT_TRUE(same_bits(model->b->weight.grad(), torch::full({4, 4}, 1.5f * step))) << "cap " << cap;
          EXPECT_TRUE(same_bits(model->c->weight.grad(), torch::full({1, 4}, 6.0f * step))) << "cap " << cap;
        }
      });
    }
  }
}

// C1: the first backward of a static graph is one under no_sync.
TEST(Accumulation, NoSyncWithAStaticGraph) {
  on_ranks(2, [&](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group, {.static_graph = true});
    for (int round = 0; round < 3; ++round) {
      f.model->zero_grad();
      {
        auto skip = ddp.no_sync();
        ddp(f.x).sum().backward();
      }
      ddp(f.x).sum().backward();
      EXPECT_EQ(f.grad(), 3.0) << "round " << round;
    }
  });
}

// C5: and exactly one reduction per bucket and round.
TEST(Accumulation, NoSyncTwiceThenSync) {
  for (bool views : {true, false}) {
    on_ranks(2, [&](auto group) {
      Fix f(group);
      DistributedDataParallel ddp(f.model, group, {.gradient_as_bucket_view = views});
      for (int round = 0; round < 3; ++round) {
        f.model->zero_grad();
        {
          auto skip = ddp.no_sync();
          ddp(f.x).sum().backward();
          ddp(2 * f.x).sum().backward();
          EXPECT_EQ(f.grad(), 3.0 * (group->rank() + 1));
        }
        ddp(3 * f.x).sum().backward();
        EXPECT_EQ(f.grad(), 9.0);
        EXPECT_EQ(ddp.last_step().messages, 1);
        EXPECT_EQ(ddp.last_step().step, round);
      }
    });
  }
}

// A parameter used only in a pass under no_sync is averaged with the pass that synchronises.
TEST(Accumulation, UsedOnlyUnderNoSync) {
  on_ranks(2, [&](auto group) {
    torch::nn::Linear a(torch::nn::LinearOptions(4, 1).bias(false)), b(torch::nn::LinearOptions(4, 1).bias(false));
    struct Holder : torch::nn::Module {
      torch::nn::Linear a, b;
      Holder(torch::nn::Linear a_, torch::nn::Linear b_) : a(a_), b(b_) {
        register_module("a", a);
        register_module("b", b);
      }
      Tensor forward(const Tensor& x) { return a(x) + b(x); }
    };
    auto model = std::make_shared<Holder>(a, b);
    DistributedDataParallel ddp(model, group);
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    for (int round = 0; round < 2; ++round) {
      model->zero_grad();
      {
        auto skip = ddp.no_sync();
        a(x).sum().backward();
      }
      b(x).sum().backward();
      EXPECT_EQ(a->weight.grad()[0][0].item<float>(), 1.5f);
      EXPECT_EQ(b->weight.grad()[0][0].item<float>(), 1.5f);
    }
  });
}

TEST(Accumulation, SyncGradsWithoutABackward) {
  on_ranks(2, [&](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    for (int round = 0; round < 3; ++round) {
      f.model->zero_grad();
      EXPECT_FALSE(ddp.has_unsynchronised_gradients());
      {
        auto skip = ddp.no_sync();
        for (int i = 0; i < 3; ++i) ddp(f.x).sum().backward();
      }
      EXPECT_TRUE(ddp.has_unsynchronised_gradients());
      ddp.sync_grads();
      EXPECT_FALSE(ddp.has_unsynchronised_gradients());
      EXPECT_EQ(f.grad(), 4.5);
    }
  });
}

// C6: what users do to gradients between backward and step.
TEST(Accumulation, GradientsMayBeClearedReplacedAndScaled) {
  on_ranks(2, [&](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    Tensor& grad = f.model->weight.mutable_grad();
    ddp(f.x).sum().backward();
    grad.reset();
    ddp(f.x).sum().backward();
    EXPECT_EQ(f.grad(), 1.5) << "cleared";
    grad = grad.clone();
    ddp(f.x).sum().backward();
    EXPECT_EQ(f.grad(), 3.0) << "replaced by a clone";
    grad.mul_(2);
    ddp(f.x).sum().backward();
    EXPECT_EQ(f.grad(), 7.5) << "scaled in place";
    f.model->zero_grad(/*set_to_none=*/false);
    ddp(f.x).sum().backward();
    EXPECT_EQ(f.grad(), 1.5) << "zeroed in place";
    grad = torch::full({4, 1}, 1.0).t();
    ddp(f.x).sum().backward();
    EXPECT_EQ(f.grad(), 2.5) << "replaced by another layout";
  });
}

struct Mean : torch::nn::Module {
  Tensor w;
  Mean() { w = register_parameter("w", torch::zeros({1})); }
  Tensor forward(const Tensor& rows) { return (rows * w).mean(); }
};

// C7: denominators 5 and 1; the gradient of one worker on the union is (5*1 + 1*10) / 6 = 2.5.
TEST(Accumulation, TrueDenominator) {
  for (bool views : {true, false}) {
    on_ranks(2, [&](auto group) {
      auto model = std::make_shared<Mean>();
      DistributedDataParallel ddp(model, group, {.gradient_as_bucket_view = views});
      const Tensor rows = group->rank() == 0 ? torch::ones({5}) : torch::full({1}, 10.0);
      auto grad = [&] { return model->w.grad().item<float>(); };

      ddp.weight(ddp(rows), static_cast<double>(rows.size(0))).backward();
      EXPECT_EQ(grad(), 2.5f);
      // What was there already takes no part in the average and is kept.
      ddp.weight(ddp(rows), static_cast<double>(rows.size(0))).backward();
      EXPECT_EQ(grad(), 5.0f);

      model->zero_grad();
      if (group->rank() == 0) {
        auto skip = ddp.no_sync();
        ddp.weight(ddp(rows.narrow(0, 0, 2)), 2).backward();
      }
      if (group->rank() == 0) {
        ddp.weight(ddp(rows.narrow(0, 2, 3)), 3).backward();
      } else {
        ddp.weight(ddp(rows), 1).backward();
      }
      EXPECT_EQ(grad(), 2.5f) << "micro-batches 2+3";

      model->zero_grad();
      const Tensor some = group->rank() == 0 ? torch::full({4}, 2.5) : torch::zeros({0});
      ddp.weight(ddp(some), static_cast<double>(some.size(0))).backward();
      EXPECT_EQ(grad(), 2.5f) << "a rank with nothing";

      model->zero_grad();
      ddp.weight(ddp(torch::zeros({0})), 0).backward();
      EXPECT_EQ(grad(), 0.0f) << "nobody has anything";

      model->zero_grad();
      ddp(rows).backward();
      EXPECT_EQ(grad(), 5.5f) << "the plain mean again";
    });
  }
}

// A loss that computes NaN on a rank whose weight is 0 must not reach the others.
TEST(Accumulation, WeightZeroSilencesNaN) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<Mean>();
    DistributedDataParallel ddp(model, group);
    const Tensor rows = group->rank() == 0 ? torch::full({2}, 3.0) : torch::full({1}, NAN);
    ddp.weight(ddp(rows), group->rank() == 0 ? 2 : 0).backward();
    EXPECT_EQ(model->w.grad().item<float>(), 3.0f);
  });
}

TEST(Accumulation, WeightsAreAllOrNone) {
  on_ranks(1, [&](auto group) {
    auto model = std::make_shared<Mean>();
    DistributedDataParallel ddp(model, group);
    {
      auto skip = ddp.no_sync();
      ddp(torch::ones({2})).backward();
    }
    EXPECT_THROW(ddp.weight(ddp(torch::ones({2})), 2).backward(), Error);
    EXPECT_THROW(ddp.weight(ddp(torch::ones({2})), -1), Error);
  });
}

// C5, with several buckets: passes under no_sync send nothing, the one that closes the window sends each bucket once.
TEST(Accumulation, EachBucketIsSentOncePerWindow) {
  on_ranks(2, [](auto group) {
    torch::nn::Sequential model;
    for (int layer = 0; layer < 3; ++layer)
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
    for (int round = 0; round < 4; ++round) {
      model->zero_grad();
      {
        auto skip = ddp.no_sync();
        for (int pass = 0; pass < 2; ++pass) ddp(torch::ones({1, 4})).sum().backward();
        EXPECT_EQ(ddp.last_step().step, round - 1);
      }
      ddp(torch::ones({1, 4})).sum().backward();
      EXPECT_EQ(ddp.last_step().step, round);
      EXPECT_EQ(ddp.last_step().messages, 3);
      EXPECT_EQ(ddp.core().bucket_sizes().size(), 3u);
    }
  });
}

}  // namespace
}  // namespace unisono
