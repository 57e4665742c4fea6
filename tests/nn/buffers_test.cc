// Buffers: policies, hooks, what changed since the ranks agreed, and when nothing is sent at all.
#include "reducer/ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

struct WithBuffers : torch::nn::Module {
  Tensor w, mean, count;
  WithBuffers(double value, std::int64_t n) {
    w = register_parameter("w", torch::ones({2}));
    mean = register_buffer("mean", torch::full({3}, value));
    count = register_buffer("count", torch::full({}, n, torch::kLong));
  }
  Tensor forward(const Tensor& x) { return (w * x).sum(); }
};

std::shared_ptr<WithBuffers> of_rank(const std::shared_ptr<ProcessGroup>& group) {
  return std::make_shared<WithBuffers>(group->rank() + 1.0, group->rank() + 1);
}

template <typename Wrapper>
void synchronise(Wrapper& ddp) {
  ddp(torch::ones({2})).backward();
}

TEST(Buffers, MeanAveragesFloatsAndTakesCountsFromRankZero) {
  on_ranks(3, [](auto group) {
    auto m = of_rank(group);
    DistributedDataParallel ddp(m, group, {.buffer_policy = BufferPolicy::mean});
    EXPECT_EQ(m->mean[0].template item<float>(), 1.0f) << "construction takes rank 0's";
    m->mean.fill_(group->rank() + 1.0);
    m->count.fill_(group->rank() + 5);
    synchronise(ddp);
    EXPECT_EQ(m->mean[0].template item<float>(), group->rank() + 1.0f) << "not due before a synchronisation";
    ddp(torch::ones({2}));
    EXPECT_TRUE(same_bits(m->mean, torch::full({3}, 2.0)));
    EXPECT_EQ(m->count.template item<std::int64_t>(), 5);
  });
}

TEST(Buffers, EveryFloatingDtypeHasAMean) {
  on_ranks(2, [](auto group) {
    struct Model : torch::nn::Module {
      Model() {
        register_parameter("w", torch::ones({2}));
        for (auto type : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kComplexFloat,
                          torch::kComplexDouble})
          register_buffer(std::string("b_") + c10::toString(type), torch::zeros({5}, type));
        register_buffer("mask", torch::zeros({5}, torch::kBool));
        register_buffer("none", torch::zeros({0}));
      }
      Tensor forward(const Tensor& x) { return (named_parameters()["w"] * x).sum(); }
    };
    auto m = std::make_shared<Model>();
    DistributedDataParallel ddp(m, group, {.buffer_policy = BufferPolicy::mean});
    for (auto& b : m->buffers()) b.fill_(group->rank());
    ddp.sync_state();
    for (const auto& b : m->named_buffers()) {
      const auto expected = torch::full_like(b.value(), b.value().scalar_type() == torch::kBool ? 0.0 : 0.5);
      EXPECT_TRUE(same_bits(b.value(), expected)) << b.key();
    }
  });
}

TEST(Buffers, PoliciesAreCompared) {
  for (const auto& failure : failures_of(2, [](auto group) {
         auto m = of_rank(group);
         DistributedDataParallel ddp(m, group,
                                     {.buffer_policy = group->rank() ? BufferPolicy::mean : BufferPolicy::rank0});
       })) {
    EXPECT_NE(failure.find("buffer_policy rank0"), std::string::npos) << failure;
    EXPECT_NE(failure.find("buffer_policy mean"), std::string::npos) << failure;
  }
}

TEST(Buffers, AreBroughtBeforeTheFirstForwardWhenConstructionDidNot) {
  on_ranks(2, [](auto group) {
    auto m = of_rank(group);
    DistributedDataParallel ddp(m, group, {.init_sync = false});
    EXPECT_EQ(m->mean[0].template item<float>(), group->rank() + 1.0f);
    ddp(torch::ones({2}));
    EXPECT_EQ(m->mean[0].template item<float>(), 1.0f);
  });
}

// E4's neighbours: the change comes after construction, on one rank or on all.
TEST(Buffers, AChangeOnOneRankIsNamedOnAllAndTheGroupStaysUsable) {
  struct Change {
    std::function<void(Tensor&)> make;
    const char* before;
    const char* after;
  };
  const std::vector<Change> changes{
      {[](Tensor& t) { t.resize_({4}); }, "'mean' Float [3]", "'mean' Float [4]"},
      {[](Tensor& t) { t.resize_({3, 1}); }, "'mean' Float [3]", "'mean' Float [3, 1]"},
      {[](Tensor& t) { t.set_data(torch::zeros({3}, torch::kInt)); }, "'mean' Float [3]", "'mean' Int [3]"},
      {[](Tensor& t) { t.set_data(torch::zeros({3}, torch::kDouble)); }, "'mean' Float [3]", "'mean' Double [3]"},
  };
  for (auto policy : {BufferPolicy::rank0, BufferPolicy::mean}) {
    for (const Change& change : changes) {
      for (int who : {0, 1, 2}) {
        on_ranks(3, [&](auto group) {
          auto m = of_rank(group);
          DistributedDataParallel ddp(m, group, {.buffer_policy = policy});
          synchronise(ddp);
          const Tensor good = m->mean.clone();
          if (group->rank() == who) change.make(m->mean);
          try {
            ddp(torch::ones({2}));
            ADD_FAILURE() << "no error on rank " << group->rank();
          } catch (const Error& e) {
            EXPECT_EQ(e.code(), ErrorCode::mismatch);
            const std::string text = e.what();
            EXPECT_NE(text.find(change.before), std::string::npos) << text;
            EXPECT_NE(text.find(change.after), std::string::npos) << text;
          }
          if (group->rank() == who) m->mean.set_data(good.clone());
          m->count.fill_(group->rank() + 7);
          ddp(torch::ones({2}));
          EXPECT_EQ(m->count.template item<std::int64_t>(), 7);
          EXPECT_TRUE(same_bits(m->mean, good));
        });
      }
    }
  }
}

TEST(Buffers, AChangeOnAllRanksIsFollowed) {
  on_ranks(2, [](auto group) {
    auto m = of_rank(group);
    DistributedDataParallel ddp(m, group);
    for (int size : {5, 2}) {
      synchronise(ddp);
      m->mean.set_data(torch::full({size}, group->rank() + 1.0, torch::kDouble));
      ddp(torch::ones({2}));
      EXPECT_TRUE(same_bits(m->mean, torch::ones({size}, torch::kDouble)));
      EXPECT_TRUE(ddp.replicas_identical());
    }
  });
}

TEST(Buffers, ABufferOnOneRankOnlyIsNamed) {
  for (const auto& failure : failures_of(2, [](auto group) {
         auto m = of_rank(group);
         DistributedDataParallel ddp(m, group);
         synchronise(ddp);
         if (group->rank() == 1) m->register_buffer("extra", torch::ones({1}));
         ddp(torch::ones({2}));
       })) {
    EXPECT_NE(failure.find("nothing more (2 tensors)"), std::string::npos) << failure;
    EXPECT_NE(failure.find("buffer 2: 'extra' Float [1]"), std::string::npos) << failure;
  }
}

// Counts the calls of a group; evaluation must make none.
TEST(Buffers, EvaluationMakesNoCollective) {
  on_ranks(2, [](auto group) {
    auto m = of_rank(group);
    DistributedDataParallel ddp(m, group);
    synchronise(ddp);
    m->mean.fill_(group->rank() + 3.0);
    if (group->rank() == 0) {  // alone: a collective would wait for the deadline
      m->eval();
      ddp(torch::ones({2}));
      m->train();
      at::NoGradGuard no_grad;
      ddp(torch::ones({2}));
      EXPECT_EQ(m->mean[0].template item<float>(), 3.0f);
    }
    ddp(torch::ones({2}));
    EXPECT_EQ(m->mean[0].template item<float>(), 3.0f);
  });
}

struct Normed : torch::nn::Module {
  torch::nn::Linear layer{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  Tensor mask;
  Normed() {
    layer = register_module("layer", torch::nn::Linear(3, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    mask = register_buffer("mask", torch::ones({4}));
  }
  Tensor forward(const Tensor& x) { return norm(layer(x)) * mask; }
};

TEST(Buffers, BatchNormWithTwoForwardsBeforeBackward) {
  on_ranks(2, [](auto group) {
    torch::manual_seed(group->rank());
    auto m = std::make_shared<Normed>();
    DistributedDataParallel ddp(m, group);
    for (int step = 0; step < 3; ++step) {
      Tensor first = ddp(torch::randn({6, 3}));
      Tensor second = ddp(torch::randn({6, 3}));
      (first.square().sum() + second.pow(3).sum()).backward();
    }
    EXPECT_EQ(m->norm->num_batches_tracked.template item<std::int64_t>(), 6);
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

// A forward whose backward comes after the next forward has brought the buffers.
TEST(Buffers, StatisticsMayBeBroughtBetweenAForwardAndItsBackward) {
  on_ranks(2, [](auto group) {
    torch::manual_seed(group->rank());
    auto m = std::make_shared<Normed>();
    DistributedDataParallel ddp(m, group);
    Tensor kept = ddp(torch::randn({6, 3}));
    ddp(torch::randn({6, 3})).square().sum().backward();
    Tensor newer = ddp(torch::randn({6, 3}));
    EXPECT_TRUE(same_bits(m->mask, torch::ones({4})));
    kept.square().sum().backward();
    newer.square().sum().backward();
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

// Any other buffer that autograd still needs must not change unnoticed.
TEST(Buffers, AChangeOfABufferThatBackwardNeedsIsAnError) {
  const auto failures = failures_of(2, [](auto group) {
    auto m = std::make_shared<Normed>();
    DistributedDataParallel ddp(m, group);
    m->mask.fill_(group->rank() + 1.0);
    Tensor kept = ddp(torch::randn({6, 3}));
    ddp(torch::randn({6, 3})).square().sum().backward();
    ddp(torch::randn({6, 3}));
    kept.square().sum().backward();
  });
  EXPECT_NE(failures[1].find("modified by an inplace operation"), std::string::npos) << failures[1];
  EXPECT_NE(failures[0].find("rank 1"), std::string::npos) << failures[0];
}

TEST(Buffers, AHookTakesThePlaceOfThePolicy) {
  on_ranks(2, [](auto group) {
    auto m = of_rank(group);
    DistributedDataParallel ddp(m, group, {.parameters_and_buffers_to_ignore = {"mean"}});
    int calls = 0;
    ddp.set_buffer_hook([&](const std::vector<NamedTensor>& buffers, ProcessGroup& g) {
      ++calls;
      ASSERT_EQ(buffers.size(), 1u);
      EXPECT_EQ(buffers[0].name, "count");
      Tensor t = buffers[0].tensor;
      g.all_reduce({t.data_ptr(), 1, Dtype::i64}).wait();
    });
    synchronise(ddp);
    m->count.fill_(group->rank() + 1);
    ddp(torch::ones({2}));
    ddp(torch::ones({2}));
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(m->count.template item<std::int64_t>(), 3);
    EXPECT_EQ(m->mean[0].template item<float>(), group->rank() + 1.0f);
    ddp.set_buffer_hook(nullptr);
    m->count.fill_(group->rank() + 1);
    ddp.sync_state();
    EXPECT_EQ(m->count.template item<std::int64_t>(), 1);
  });
}

TEST(Buffers, SyncStateMakesReplicasIdenticalDueOrNot) {
  for (bool per_step : {true, false}) {
    on_ranks(2, [&](auto group) {
      auto m = of_rank(group);
      DistributedDataParallel ddp(m, group, {.broadcast_buffers = per_step});
      m->mean.fill_(group->rank() + 3.0);
      EXPECT_FALSE(ddp.replicas_identical());
      ddp.sync_state();
      EXPECT_TRUE(ddp.replicas_identical());
      EXPECT_EQ(m->mean[0].template item<float>(), 3.0f);
    });
  }
  on_ranks(1, [](auto group) {
    auto m = of_rank(group);
    DistributedDataParallel ddp(m, group);
    ddp.sync_state();
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

}  // namespace
}  // namespace unisono
