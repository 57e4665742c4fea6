// What ranks tell each other at the end of a backward, and what of it is an error on all of them.
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

void expect_all_say(const std::vector<std::string>& failures, std::initializer_list<const char*> parts) {
  for (const auto& failure : failures) {
    EXPECT_EQ(failure, failures[0]);
    for (const char* part : parts) EXPECT_NE(failure.find(part), std::string::npos) << failure;
  }
}

// One rank in no_sync by mistake: its next synchronising backward sums two, the others' one.
TEST(Checks, RanksThatDisagreeOnNoSyncAreNamed) {
  for (int wrong : {0, 2}) {
    const auto failures = failures_of(3, [&](auto group) {
      Fix f(group);
      DistributedDataParallel ddp(f.model, group);
      for (int step = 0; step < 4; ++step) {
        auto skip = ddp.no_sync(step == 1 && group->rank() == wrong);
        ddp(f.x).sum().backward();
      }
    });
    expect_all_say(failures, {wrong == 0 ? "rank 0 sums 2 backwards in step 1, rank 1 sums 1"
                                         : "rank 0 sums 1 backwards in step 1, rank 2 sums 2",
                              "no_sync", "weight"});
  }
}

TEST(Checks, UnevenAccumulationOnPurpose) {
  on_ranks(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group, {.uneven_accumulation = true});
    if (group->rank() == 1) {
      auto skip = ddp.no_sync();
      ddp(f.x).sum().backward();
    }
    ddp(f.x).sum().backward();
    EXPECT_EQ(f.grad(), 2.5);  // (1 + 2 * 2) / 2
  });
  on_ranks(2, [](auto group) {  // with weights it is always meant
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    if (group->rank() == 1) {
      auto skip = ddp.no_sync();
      ddp.weight(ddp(f.x).sum(), 1).backward();
    }
    ddp.weight(ddp(f.x).sum(), 1).backward();
    EXPECT_NEAR(f.grad(), 5.0 / 3, 1e-6);  // f32
  });
}

// After the error the step can be taken again.
TEST(Checks, TheGroupStaysUsable) {
  on_ranks(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    if (group->rank() == 1) {
      auto skip = ddp.no_sync();
      ddp(f.x).sum().backward();
    }
    EXPECT_THROW(ddp(f.x).sum().backward(), Error);
    f.model->zero_grad();
    ddp(f.x).sum().backward();
    EXPECT_EQ(f.grad(), 1.5);
  });
}

// sync_grads is no backward of its own.
TEST(Checks, ByHandOrByBackward) {
  on_ranks(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    if (group->rank() == 0) {
      ddp(f.x).sum().backward();
    } else {
      auto skip = ddp.no_sync();
      ddp(f.x).sum().backward();
      ddp.sync_grads();
    }
    EXPECT_EQ(f.grad(), 1.5);
  });
}

// F1: other learning rates (or loss scales) drive replicas apart: the next step says so on every rank, by name.
TEST(Checks, DriftIsNamed) {
  const auto failures = failures_of(2, [](auto group) {
    torch::manual_seed(0);
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 1));
    DistributedDataParallel ddp(model, group);
    torch::optim::SGD optimizer(model->parameters(), group->rank() == 0 ? 0.1 : 0.2);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      ddp(torch::ones({2, 4})).sum().backward();
      optimizer.step();
    }
  });
  expect_all_say(failures, {"drifted apart before step 1", "'0.weight'", "rank 0 and rank 1", "loss"});
}

// One parameter of many: found when its turn comes, at the latest after parameters / 64 steps.
TEST(Checks, DriftOfOneParameterOfMany) {
  const auto failures = failures_of(2, [](auto group) {
    struct Many : torch::nn::Module {
      Many() {
        for (int i = 0; i < 150; ++i) all.push_back(register_parameter("p" + std::to_string(i), torch::ones({3})));
      }
      Tensor forward() { return torch::cat(all).sum(); }
      std::vector<Tensor> all;
    };
    auto m = std::make_shared<Many>();
    DistributedDataParallel ddp(m, group);
    if (group->rank() == 1) m->all[149].data().add_(1);
    for (int step = 0; step < 3; ++step) ddp().backward();
  });
  expect_all_say(failures, {"'p149'", "before step 2"});
}

TEST(Checks, DriftOnPurpose) {
  on_ranks(2, [](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group, {.check_replicas = false});
    f.model->weight.data().add_(group->rank());
    ddp(f.x).sum().backward();
    EXPECT_EQ(f.grad(), 1.5);
  });
}

TEST(Checks, NonFiniteGradientsAreNamedWithTheirRank) {
  for (bool overlap : {true, false}) {
    const auto failures = failures_of(3, [&](auto group) {
      torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 1));
      DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0, .overlap = overlap, .check_finite = true});
      ddp(torch::ones({1, 4})).sum().backward();
      if (group->rank() == 1) {
        model->named_parameters()["0.bias"].register_hook([](const Tensor& g) { return g / 0; });
      }
      ddp(torch::ones({1, 4})).sum().backward();
    });
    expect_all_say(failures, {"'0.bias'", "step 1", "on rank 1,"});
  }
}

// Kept in bf16, averaged in f32: the average of values that bf16 sums would round, in the parameter's dtype.
TEST(Checks, ReducedInAnotherDtype) {
  on_ranks(4, [](auto group) {
    auto m = torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false));
    m->to(at::kBFloat16);
    DistributedDataParallel ddp(m, group, {.reduce_dtype = Dtype::f32});
    EXPECT_EQ(ddp.core().bucket_sizes().at(0), 64);
    for (int step = 0; step < 3; ++step) {
      m->zero_grad();
      ddp(torch::full({1, 4}, group->rank() == 0 ? 1.0 : 1.0 / 512, at::kBFloat16)).sum().backward();
      const Tensor grad = m->weight.grad();
      EXPECT_EQ(grad.scalar_type(), at::kBFloat16);
      // (1 + 3 / 512) / 4 = 0.25146..., in bf16 0.251953125 or 0.25: nearest is 0.251953125.
      EXPECT_EQ(grad[0][0].template item<double>(), 0.251953125);
    }
    {
      auto skip = ddp.no_sync();
      ddp(torch::ones({1, 4}, at::kBFloat16)).sum().backward();
    }
    ddp.sync_grads();
  });
}

}  // namespace
}  // namespace unisono
