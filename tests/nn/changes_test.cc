// Modules that change after they were wrapped: followed on all ranks, or refused by name.
#include "reducer/ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

struct Net : torch::nn::Module {
  Net() {
    at::NoGradGuard no_grad;
    for (auto& p : parameters()) p.fill_(1);
  }
  torch::nn::Linear a = register_module("a", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false)));
  torch::nn::Linear extra{nullptr};
  Tensor forward(const Tensor& x) {
    Tensor y = b(a(x));
    return extra.is_empty() ? y : y + extra(x);
  }
};

double first(const Tensor& grad) { return grad.defined() ? grad.flatten()[0].item<double>() : NAN; }

// B10: frozen at wrap, unfrozen later; and the reverse. With views and without.
TEST(Changes, FreezeAndUnfreeze) {
  for (bool views : {true, false}) {
    on_ranks(2, [&](auto group) {
      auto m = std::make_shared<Net>();
      m->a->weight.set_requires_grad(false);
      DistributedDataParallel ddp(m, group, {.gradient_as_bucket_view = views});
      const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
      for (bool trained : {false, true, false, true}) {
        m->a->weight.set_requires_grad(trained);
        for (int step = 0; step < 2; ++step) {
          m->zero_grad();
          ddp(x).sum().backward();
          EXPECT_EQ(first(m->b->weight.grad()), 6.0);  // mean of 4 and 8
          if (trained) EXPECT_EQ(first(m->a->weight.grad()), 1.5);
        }
        EXPECT_EQ(ddp.core().bucket_sizes().at(0), trained ? 128 : 64);
      }
    });
  }
}

TEST(Changes, UnfrozenPastTheWrapperIsRefused) {
  const auto failures = failures_of(2, [](auto group) {
    auto m = std::make_shared<Net>();
    m->a->weight.set_requires_grad(false);
    DistributedDataParallel ddp(m, group);
    m->a->weight.set_requires_grad(true);
    m->forward(torch::ones({1, 4})).sum().backward();
  });
  for (const auto& failure : failures) EXPECT_NE(failure.find("'a.weight'"), std::string::npos) << failure;
}

// The other rank compares no modules, so both hear which two calls met; it adds what its bucket holds.
TEST(Changes, UnfrozenOnOneRankIsNamed) {
  for (int odd : {0, 1}) {
    const auto failures = failures_of(2, [&](auto group) {
      auto m = std::make_shared<Net>();
      m->a->weight.set_requires_grad(false);
      DistributedDataParallel ddp(m, group);
      if (group->rank() == odd) m->a->weight.set_requires_grad(true);
      try {
        ddp(torch::ones({1, 4})).sum().backward();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::mismatch);
        throw;
      }
    });
    const std::string& changed = failures[static_cast<std::size_t>(odd)];
    for (const std::string& part :
         {"rank " + std::to_string(odd) + " calls all_gather(i64, 1 element, change of 'a.weight')",
          "rank " + std::to_string(1 - odd) + " calls all_reduce(", std::string("gradients of step 0, bucket 0")}) {
      EXPECT_NE(changed.find(part), std::string::npos) << changed;
    }
    EXPECT_EQ(failures[static_cast<std::size_t>(1 - odd)], changed + " Bucket 0 holds 'b.weight'.");
  }
}

// A layer added, with other values on each rank: all train rank 0's. A parameter replaced. A model converted.
TEST(Changes, AddedReplacedConverted) {
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<Net>();
    DistributedDataParallel ddp(m, group);
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    ddp(x).sum().backward();
    torch::manual_seed(group->rank());
    m->extra = m->register_module("extra", torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false)));
    m->zero_grad();
    ddp(x).sum().backward();
    EXPECT_EQ(first(m->extra->weight.grad()), 1.5);
    EXPECT_TRUE(ddp.replicas_identical());

    m->unregister_module("extra");
    m->extra = nullptr;
    m->b = m->replace_module("b", torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false)));
    m->zero_grad();
    ddp(x).sum().backward();
    EXPECT_EQ(first(m->b->weight.grad()), 6.0);
    EXPECT_TRUE(ddp.replicas_identical());

    m->to(at::kDouble);
    m->zero_grad();
    ddp(x.to(at::kDouble)).sum().backward();
    EXPECT_EQ(m->b->weight.grad().scalar_type(), at::kDouble);
    EXPECT_EQ(first(m->b->weight.grad()), 6.0);
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

// A module that had no buffers gets one of three kinds: with parameters beside it, without any, and registered by hand.
TEST(Changes, AddedBuffersAreRankZeros) {
  for (bool per_step : {true, false}) {
    on_ranks(2, [&](auto group) {
      auto m = std::make_shared<Net>();
      DistributedDataParallel ddp(m, group, {.broadcast_buffers = per_step});
      const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
      ddp(x).sum().backward();
      auto norm = m->register_module("norm", torch::nn::BatchNorm1d(4));
      norm->running_mean.fill_(group->rank() + 3.0);
      ddp(x).sum().backward();
      EXPECT_EQ(first(norm->running_mean), 3.0);
      norm->running_mean.fill_(group->rank() + 5.0);
      ddp(x).sum().backward();
      EXPECT_EQ(first(norm->running_mean), per_step ? 5.0 : group->rank() + 5.0);
      ddp.sync_state();
      EXPECT_EQ(first(norm->running_mean), 5.0);
      EXPECT_TRUE(ddp.replicas_identical());
    });
  }
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<Net>();
    DistributedDataParallel ddp(m, group);
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    auto norm = m->register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).affine(false)));
    norm->running_mean.fill_(group->rank() + 3.0);
    ddp(x).sum().backward();
    EXPECT_EQ(first(norm->running_mean), 3.0);
    EXPECT_TRUE(ddp.replicas_identical());
  });
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<Net>();
    DistributedDataParallel ddp(m, group);
    const Tensor late = m->register_buffer("late", torch::full({3}, group->rank() + 1.0));
    ddp.sync_state();
    EXPECT_EQ(first(late), 1.0);
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

// Gradients, transform, tracing and steps go on over a change.
TEST(Changes, KeepWhatWasSet) {
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<Net>();
    DistributedDataParallel ddp(m, group);
    ddp.core().set_transform(bf16_transform());
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    ddp(x).sum().backward();
    const Tensor held = m->b->weight.grad();
    m->a->weight.set_requires_grad(false);
    ddp(x).sum().backward();  // no zero_grad: accumulates
    EXPECT_EQ(first(m->b->weight.grad()), 12.0);
    EXPECT_EQ(ddp.core().transform()->name(), "bf16");
    EXPECT_EQ(ddp.last_step().step, 1);
    {
      auto skip = ddp.no_sync();
      ddp(x).sum().backward();
    }
    m->a->weight.set_requires_grad(true);
    EXPECT_THROW(ddp(x), Error);  // in the middle of an accumulation
    m->a->weight.set_requires_grad(false);
    ddp.sync_grads();
  });
}

TEST(Changes, WrappedTwiceOrNested) {
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<Net>();
    {
      DistributedDataParallel ddp(m, group);
      const auto again = [&] { DistributedDataParallel second(m, group); };
      EXPECT_THROW(again(), Error);
      const auto part = [&] { DistributedDataParallel second(m->a, group); };
      EXPECT_THROW(part(), Error);
    }
    DistributedDataParallel ddp(m, group);  // the first is gone
    ddp(torch::full({1, 4}, group->rank() + 1.0)).sum().backward();
    EXPECT_EQ(first(m->b->weight.grad()), 6.0);
  });
}

// Several wrapped modules in one program, and one backward through both.
TEST(Changes, TwoWrappers) {
  on_ranks(2, [](auto group) {
    auto one = std::make_shared<Net>(), two = std::make_shared<Net>();
    DistributedDataParallel first_ddp(one, group), second_ddp(two, group);
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    for (int step = 0; step < 3; ++step) {
      one->zero_grad();
      two->zero_grad();
      (first_ddp(x).sum() + second_ddp(x).sum()).backward();
      EXPECT_EQ(first(one->b->weight.grad()), 6.0);
      EXPECT_EQ(first(two->b->weight.grad()), 6.0);
    }
  });
}

// Two models of equal shapes whose backwards come in another order on one rank: their messages would fit each other.
TEST(Changes, TwoWrappersInAnotherOrderAreNamed) {
  for (int between : {0, 7}) {  // wrappers that are gone again
    const auto failures = failures_of(2, [&](auto group) {
      auto one = std::make_shared<Net>(), two = std::make_shared<Net>();
      DistributedDataParallel first_ddp(one, group);
      for (int i = 0; i < between; ++i) DistributedDataParallel(std::make_shared<Net>(), group);
      DistributedDataParallel second_ddp(two, group);
      const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
      Tensor a = first_ddp(x).sum(), b = second_ddp(x).sum();
      (group->rank() == 0 ? a : b).backward();
      (group->rank() == 0 ? b : a).backward();
    });
    const std::string second = "gradients, wrapper " + std::to_string(between + 1) + " of step 0";
    for (const auto& failure : failures) {
      EXPECT_NE(failure.find("gradients of step 0"), std::string::npos) << failure;
      EXPECT_NE(failure.find(second), std::string::npos) << failure;
    }
  }
}

// C3: three micro-batches under no_sync, then a step.
TEST(Changes, AStepOnUnsynchronisedGradientsIsRefused) {
  on_ranks(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    torch::optim::SGD optimizer(f.model->parameters(), 0.1);
    {
      auto skip = ddp.no_sync();
      for (int i = 1; i <= 3; ++i) ddp(f.x).sum().backward();
    }
    const Tensor before = f.model->weight.detach().clone();
    EXPECT_THROW(ddp.step(optimizer), Error);
    EXPECT_TRUE(same_bits(before, f.model->weight));
    ddp.sync_grads();
    EXPECT_EQ(f.grad(), 4.5);
    ddp.step(optimizer);
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

TEST(Changes, DelayedParametersLeaveLast) {
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<Net>();
    DistributedDataParallel ddp(m, group, {.delayed_parameters = {"b.weight"}});
    for (int step = 0; step < 3; ++step) {
      m->zero_grad();
      ddp(torch::full({1, 4}, group->rank() + 1.0)).sum().backward();
      EXPECT_EQ(first(m->b->weight.grad()), 6.0);
      EXPECT_EQ(first(m->a->weight.grad()), 1.5);
    }
    EXPECT_EQ(ddp.core().bucket_sizes(), (std::vector<std::int64_t>{64, 64}));
  });
}

}  // namespace
}  // namespace unisono
