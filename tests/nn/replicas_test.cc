// What the wrapper does around the reducer: comparing modules, taking rank 0's state, buffers.
#include <sstream>

#include "reducer/ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

struct Custom : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (auto& item : named_children()) y = item.value()->as<torch::nn::Linear>()->forward(y);
    return y;
  }
  void add(const std::string& name, int in, int out) {
    register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  }
};

void expect_all_say(const std::vector<std::string>& failures, std::initializer_list<const char*> parts) {
  for (const auto& failure : failures) {
    EXPECT_EQ(failure, failures[0]);
    for (const char* part : parts) EXPECT_NE(failure.find(part), std::string::npos) << failure;
  }
}

// A4: the same shapes under other names.
TEST(Replicas, OrderOfLayersIsCompared) {
  expect_all_say(failures_of(2,
                             [](auto group) {
                               auto m = std::make_shared<Custom>();
                               for (const char* name : group->rank() == 0 ? std::array{"a", "b"} : std::array{"b", "a"})
                                 m->add(name, 4, 4);
                               DistributedDataParallel ddp(m, group);
                             }),
                 {"parameter 0", "'a.weight'", "'b.weight'"});
}

// A5: another count of layers, another shape, another dtype, one frozen.
TEST(Replicas, EveryDifferenceIsNamed) {
  const auto difference = [](int world, const std::function<void(Custom&)>& change) {
    return failures_of(world, [&](auto group) {
      auto m = std::make_shared<Custom>();
      m->add("a", 4, 4);
      if (group->rank() == world - 1) change(*m);
      DistributedDataParallel ddp(m, group);
    });
  };
  expect_all_say(difference(2, [](Custom& m) { m.add("z", 4, 4); }), {"'z.weight'", "nothing more"});
  expect_all_say(difference(2, [](Custom& m) { m.named_parameters()["a.weight"].set_data(torch::zeros({4, 5})); }),
                 {"[4, 4]", "[4, 5]"});
  expect_all_say(difference(3, [](Custom& m) { m.to(torch::kFloat64); }), {"Float", "Double", "rank 2"});
  expect_all_say(difference(4,
                            [](Custom& m) {
                              m.add("b", 4, 4);
                              m.named_parameters()["a.weight"].set_requires_grad(false);
                            }),
                 {"requires grad", "no grad", "rank 3"});
}

// A5: neither at the first position nor on the last rank.
TEST(Replicas, AMiddleRankAndPositionAreNamed) {
  expect_all_say(failures_of(3,
                             [](auto group) {
                               auto m = std::make_shared<Custom>();
                               for (const char* name : {"a", "b"}) m->add(name, 4, 4);
                               m->add("c", 4, group->rank() == 1 ? 5 : 4);
                               DistributedDataParallel ddp(m, group);
                             }),
                 {"the modules of rank 0 and rank 1 differ", "parameter 2: 'c.weight'", "[4, 4]", "[5, 4]"});
}

TEST(Replicas, OptionsAreCompared) {
  expect_all_say(failures_of(2,
                             [](auto group) {
                               Fix f(group);
                               DistributedDataParallel ddp(f.model, group, {.bucket_cap_mb = group->rank() + 1.0});
                             }),
                 {"bucket_cap_mb 1", "bucket_cap_mb 2"});
}

struct WithBuffer : torch::nn::Module {
  Tensor w, q;
  explicit WithBuffer(Tensor buffer) {
    w = register_parameter("w", torch::ones({2}));
    q = register_buffer("q", std::move(buffer));
  }
  Tensor forward(const Tensor& x) { return (w * x).sum(); }
};

// E3: construction and per-step broadcast are two switches.
TEST(Replicas, BuffersAreRankZerosAtConstruction) {
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<WithBuffer>(torch::full({3}, group->rank() * 1.0));
    DistributedDataParallel ddp(m, group, {.broadcast_buffers = false});
    EXPECT_TRUE(same_bits(m->q, torch::zeros({3})));
    m->q.fill_(group->rank());
    ddp(torch::ones({2})).backward();
    ddp(torch::ones({2}));
    EXPECT_EQ(m->q[0].template item<float>(), group->rank());
  });
}

// E4: another shape on another rank.
TEST(Replicas, BuffersOfDifferentSizesAreRefused) {
  expect_all_say(failures_of(2,
                             [](auto group) {
                               auto m = std::make_shared<WithBuffer>(torch::full({2 + group->rank()}, 7.0));
                               DistributedDataParallel ddp(m, group);
                             }),
                 {"buffer 0: 'q'", "[2]", "[3]"});
}

// All ranks have made the same calls when the modules are found to differ: the group serves the next module.
TEST(Replicas, TheGroupServesTheNextModuleAfterAMismatch) {
  for (int world : {2, 3}) {
    on_ranks(world, [&](auto group) {
      const auto refused = [&](auto module) {
        try {
          DistributedDataParallel ddp(module, group);
          ADD_FAILURE() << "constructed";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::mismatch) << error.what();
        }
      };
      auto other = std::make_shared<Custom>();
      other->add("a", 4, group->rank() == 1 ? 5 : 4);
      refused(other);
      refused(std::make_shared<WithBuffer>(torch::full({2 + (group->rank() == 1)}, 7.0)));
      Fix f(group);
      DistributedDataParallel ddp(f.model, group);
      for (int step = 0; step < 3; ++step) {
        f.model->zero_grad();
        ddp(f.x).sum().backward();
        EXPECT_TRUE(same_bits(f.model->weight.grad(), torch::full({1, 4}, (world + 1) / 2.0)));
      }
      EXPECT_TRUE(ddp.replicas_identical());
    });
  }
}

// Once before the first forward after a synchronisation, never under no_sync, never without gradients.
TEST(Replicas, BuffersFollowRankZeroAfterASynchronisation) {
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<WithBuffer>(torch::zeros({1}));
    DistributedDataParallel ddp(m, group);
    const double mine = group->rank() + 1.0;
    const auto value = [&] { return m->q.template item<float>(); };
    m->q.fill_(mine);
    Tensor loss = ddp(torch::ones({2}));
    EXPECT_EQ(value(), mine) << "nothing was synchronised since construction";
    loss.backward();
    {
      at::NoGradGuard evaluation;
      ddp(torch::ones({2}));
      EXPECT_EQ(value(), mine) << "evaluation";
    }
    {
      auto skip = ddp.no_sync();
      ddp(torch::ones({2})).backward();
      EXPECT_EQ(value(), mine) << "no_sync";
    }
    ddp(torch::ones({2})).backward();
    EXPECT_EQ(value(), 1.0);
  });
}

TEST(Replicas, ParametersAreRankZerosAtConstruction) {
  on_ranks(3, [](auto group) {
    torch::manual_seed(group->rank());
    torch::nn::Sequential m(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4));
    m->to(torch::kFloat32);
    {
      at::NoGradGuard no_grad;
      for (auto& p : m->parameters()) p.normal_();
      for (auto& b : m->buffers()) b.fill_(group->rank());
    }
    m[0]->as<torch::nn::Conv2d>()->weight.set_data(
        m[0]->as<torch::nn::Conv2d>()->weight.to(at::MemoryFormat::ChannelsLast));
    DistributedDataParallel ddp(m, group);
    EXPECT_TRUE(ddp.replicas_identical());
    {
      at::NoGradGuard no_grad;
      if (group->rank() == 2) m->parameters()[0][1][2][0][1] += 1e-3;
    }
    EXPECT_FALSE(ddp.replicas_identical());
  });
}

TEST(Replicas, RefusesWhatItCannotTrain) {
  const auto says = [](const std::string& part, const std::function<void(std::shared_ptr<ProcessGroup>)>& body) {
    for (const auto& failure : failures_of(2, body)) EXPECT_NE(failure.find(part), std::string::npos) << failure;
  };
  says("no parameter of the module requires grad", [](auto group) {
    auto m = std::make_shared<WithBuffer>(torch::zeros({1}));
    m->w.set_requires_grad(false);
    DistributedDataParallel ddp(m, group);
  });
  says("'w' is on the meta device", [](auto group) {
    auto m = std::make_shared<WithBuffer>(torch::zeros({1}));
    m->w = m->register_parameter("w2", torch::ones({2}));
    struct Meta : torch::nn::Module {
      Meta() { register_parameter("w", torch::ones({2}, torch::device(torch::kMeta))); }
      int forward() { return 0; }
    };
    DistributedDataParallel ddp(std::make_shared<Meta>(), group);
  });
  says("needs a process group", [](auto) {
    auto m = std::make_shared<WithBuffer>(torch::zeros({1}));
    DistributedDataParallel ddp(m, nullptr);
  });
}

TEST(Replicas, IgnoredTensorsAreLeftAlone) {
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<WithBuffer>(torch::full({1}, group->rank() * 1.0));
    DistributedDataParallel ddp(m, group, {.parameters_and_buffers_to_ignore = {"q"}});
    EXPECT_EQ(m->q.template item<float>(), group->rank());
    ddp(torch::full({2}, group->rank() + 1.0)).backward();
    EXPECT_EQ(m->w.grad()[0].template item<float>(), 1.5f);
  });
}

// G1: what torch::save writes of a wrapped module is the module's own, and loads into a bare one, which is wrapped
// again.
TEST(Replicas, SavedAndLoaded) {
  on_ranks(2, [](auto group) {
    const auto make = [] {
      return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 1));
    };
    auto model = make();
    DistributedDataParallel ddp(model, group);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      ddp(torch::randn({5, 4}) + group->rank()).pow(2).mean().backward();
      optimizer.step();
    }
    ddp.sync_state();
    std::stringstream file;
    torch::save(model, file);
    auto loaded = make();
    torch::load(loaded, file);
    const auto before = model->named_parameters(), after = loaded->named_parameters();
    ASSERT_EQ(before.keys(), after.keys());
    for (const auto& p : before) EXPECT_TRUE(same_bits(p.value(), after[p.key()])) << p.key();
    DistributedDataParallel again(loaded, group);
    EXPECT_EQ(again.digest(), ddp.digest());
  });
}

}  // namespace
}  // namespace unisono
