// Ranks with different numbers of steps.
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

// D8: rank 0 has three batches, rank 1 one; the local gradient is 1.
std::vector<std::vector<double>> averages(bool by_initial, bool weighted) {
  std::vector<std::vector<double>> seen(2);
  on_ranks(2, [&](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    ddp.join(
        [&] {
          for (int step = 0; step < (group->rank() == 0 ? 3 : 1); ++step) {
            f.model->zero_grad();
            Tensor loss = ddp(torch::ones({1, 4})).sum();
            if (weighted) loss = ddp.weight(loss, 2 + group->rank());
            loss.backward();
            seen[static_cast<std::size_t>(group->rank())].push_back(f.grad());
          }
        },
        {.divide_by_initial_world_size = by_initial});
    EXPECT_TRUE(ddp.replicas_identical());
  });
  return seen;
}

TEST(Join, BothDivisors) {
  EXPECT_EQ(averages(true, false), (std::vector<std::vector<double>>{{1, 0.5, 0.5}, {1}}));
  EXPECT_EQ(averages(false, false), (std::vector<std::vector<double>>{{1, 1, 1}, {1}}));
  EXPECT_EQ(averages(true, true), (std::vector<std::vector<double>>{{1, 1, 1}, {1}}));
}

// All end with the parameters and buffers of those that took the last step, whoever that was; the gradients and
// parameters of a rank that waits are left alone meanwhile, and training goes on afterwards.
TEST(Join, EndsWithTheLastOnesState) {
  for (int longest : {0, 1, 2}) {
    on_ranks(3, [&](auto group) {
      torch::manual_seed(0);
      torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 1));
      DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
      torch::optim::SGD optimizer(model->parameters(), 0.1);  // momentum would differ: not every rank stepped
      const auto step = [&] {
        optimizer.zero_grad();
        ddp(torch::randn({6, 4}) + group->rank()).pow(2).mean().backward();
        optimizer.step();
      };
      const int steps = 2 + 3 * (group->rank() == longest);
      ddp.join([&] {
        for (int i = 0; i < steps; ++i) step();
      });
      EXPECT_TRUE(ddp.replicas_identical());
      EXPECT_EQ(model->named_buffers()["1.num_batches_tracked"].template item<std::int64_t>(), 5);
      ddp.join([] {});  // nobody has anything
      step();
      EXPECT_TRUE(ddp.replicas_identical());
    });
  }
}

TEST(Join, WithNoSync) {
  on_ranks(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    ddp.join([&] {
      for (int step = 0; step < 2 + group->rank(); ++step) {
        f.model->zero_grad();
        {
          auto skip = ddp.no_sync();
          ddp(f.x).sum().backward();
        }
        ddp(f.x).sum().backward();
        EXPECT_EQ(f.grad(), step < 2 ? 3 : 2);
      }
    });
  });
}

TEST(Join, ThrowsOnEarlyTermination) {
  const auto failures = failures_of(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    ddp.join(
        [&] {
          for (int step = 0; step < (group->rank() == 0 ? 3 : 1); ++step) {
            f.model->zero_grad();
            ddp(f.x).sum().backward();
          }
        },
        {.throw_on_early_termination = true});
  });
  for (const auto& failure : failures)
    EXPECT_NE(failure.find("rank 1 has no more inputs in step 1"), std::string::npos) << failure;
  EXPECT_EQ(failures[0], failures[1]);
  on_ranks(2, [](auto group) {  // all end together: nobody ends early
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    ddp.join([&] { ddp(f.x).sum().backward(); }, {.throw_on_early_termination = true});
  });
}

// A collective of the user's own meets a rank that waits: named on both, not hung.
TEST(Join, AUsersOwnCollectiveIsNamed) {
  const auto failures = failures_of(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    ddp.join([&] {
      for (int step = 0; step < (group->rank() == 0 ? 2 : 1); ++step) {
        f.model->zero_grad();
        ddp(f.x).sum().backward();
        float loss = 1;
        group->all_reduce({&loss, 1, Dtype::f32}).wait();
      }
    });
  });
  for (const auto& failure : failures) EXPECT_NE(failure.find("all_reduce"), std::string::npos) << failure;
}

// Nothing is sent for it: as many messages per step as without.
TEST(Join, CostsNoMessage) {
  on_ranks(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    ddp.join([&] {
      for (int step = 0; step < 3; ++step) {
        f.model->zero_grad();
        ddp(f.x).sum().backward();
        EXPECT_EQ(ddp.last_step().messages, 1);
      }
    });
  });
}

TEST(Join, Misuse) {
  on_ranks(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    ddp.core().begin_join();
    EXPECT_THROW(ddp.core().begin_join(), Error);
    ddp.core().cancel_join();
    {
      auto skip = ddp.no_sync();
      ddp(f.x).sum().backward();
    }
    EXPECT_THROW(ddp.core().begin_join(), Error);
    ddp.sync_grads();
    EXPECT_THROW(ddp.join([] { throw std::runtime_error("mine"); }), std::runtime_error);
    ddp.join([] {});
  });
}

}  // namespace
}  // namespace unisono
