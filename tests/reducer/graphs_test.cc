// Graphs of every shape: what is used, in which order, how often, by whom.
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

// Free parameters; a loss over them fires their gradients in the order given (autograd runs what was made last first).
struct Parameters : torch::nn::Module {
  std::vector<Tensor> p;
  explicit Parameters(int n, int size = 3) {
    for (int i = 0; i < n; ++i) p.push_back(register_parameter("p" + std::to_string(i + 1), torch::ones({size})));
  }
  Tensor forward(const std::vector<int>& fire_order, double scale) {
    Tensor loss = torch::zeros({});
    for (auto it = fire_order.rbegin(); it != fire_order.rend(); ++it) {
      loss = loss + (p[static_cast<std::size_t>(*it - 1)] * (scale * *it)).sum();
    }
    return loss;
  }
};

// The paper's figure on why order and absence matter: gradients ready as 1,2,3,4 on one rank and 1,3,4,2 on the other,
// and gradient 3 skipped on one rank only.
TEST(Graphs, ReadyOrderAndAbsenceMayDifferBetweenRanks) {
  for (double cap : {0.0, 6.0 / (1 << 20) * 4, 25.0}) {
    for (bool overlap : {true, false}) {
      on_ranks(2, [&](auto group) {
        auto model = std::make_shared<Parameters>(4);
        DistributedDataParallel ddp(model, group, {.bucket_cap_mb = cap, .overlap = overlap});
        const bool first = group->rank() == 0;
        for (int step = 0; step < 4; ++step) {
          model->zero_grad();
          const bool skip = step % 2 == 1;
          const std::vector<int> order = first  ? std::vector{1, 2, 3, 4}
                                         : skip ? std::vector{1, 4, 2}
                                                : std::vector{1, 3, 4, 2};
          ddp(order, first ? 1.0 : 3.0).backward();
          for (int i = 1; i <= 4; ++i) {
            const double expected = i * (i == 3 && skip ? 0.5 : 2.0);
            EXPECT_TRUE(same_bits(model->p[static_cast<std::size_t>(i - 1)].grad(), torch::full({3}, expected)))
                << "p" << i << " step " << step << " cap " << cap << "\n"
                << model->p[static_cast<std::size_t>(i - 1)].grad();
          }
        }
      });
    }
  }
}

TEST(Graphs, RebuildsInTheObservedOrderOnce) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<Parameters>(6, 1000);
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.007});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      ddp(std::vector{1, 2, 3, 4, 5, 6}, group->rank() + 1.0).backward();
      EXPECT_EQ(ddp.last_step().rebuilds, step == 0 ? 0 : 1);
      EXPECT_EQ(ddp.last_step().messages, 3);
      EXPECT_EQ(model->p[5].grad()[999].template item<float>(), 9.0f);
    }
  });
}

// B2: whatever forward returns.
struct Opaque {
  Tensor hidden;
  std::string note;
};

struct TwoLayers : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  TwoLayers() {
    a = register_module("a", torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false)));
    b = register_module("b", torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false)));
  }
  Tensor forward(const Tensor& x) { return b(x); }
};

// B1: a parameter that no rank uses stays exactly as it was, undefined or not.
TEST(Graphs, UnusedEverywhereIsUntouched) {
  for (int world : {2, 3}) {
    on_ranks(world, [&](auto group) {
      auto model = std::make_shared<TwoLayers>();
      DistributedDataParallel ddp(model, group);
      const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
      ddp(x).sum().backward();
      EXPECT_FALSE(model->a->weight.grad().defined());
      EXPECT_FLOAT_EQ(model->b->weight.grad()[0][0].template item<float>(), (world + 1) / 2.0f);
      // A value whose mean over three ranks is not itself in float: it must not be averaged with itself.
      const Tensor odd = torch::full({1, 4}, 0.1f);
      model->a->weight.mutable_grad() = odd.clone();
      for (int step = 0; step < 5; ++step) {
        ddp(x).sum().backward();
        EXPECT_TRUE(same_bits(model->a->weight.grad(), odd));
      }
    });
  }
}

TEST(Graphs, UnusedOnOneRankIsTheMeanWithZero) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<TwoLayers>();
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    for (int step = 0; step < 6; ++step) {
      model->zero_grad();
      Tensor loss = ddp(x).sum();
      if (group->rank() == 1) loss = loss + model->a(x).sum();
      loss.backward();
      EXPECT_EQ(model->a->weight.grad()[0][0].template item<float>(), 1.0f) << step;
      EXPECT_EQ(model->b->weight.grad()[0][0].template item<float>(), 1.5f) << step;
    }
  });
}

// Silent for long, so that its bucket no longer waits for it, then used again after the bucket has left.
TEST(Graphs, UsedAgainAfterItsBucketHasLeft) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<TwoLayers>();
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    for (int step = 0; step < 12; ++step) {
      model->zero_grad();
      const bool use_a = step % 6 == 5;
      Tensor loss = use_a ? ddp(x).sum() * 2 + 0 * x.sum() : ddp(x).sum();
      if (use_a) loss = model->a(x).sum() + loss;
      loss.backward();
      EXPECT_EQ(model->a->weight.grad().defined(), use_a);
      if (use_a) {
        EXPECT_EQ(model->a->weight.grad()[0][0].template item<float>(), 1.5f);
      }
      EXPECT_EQ(model->b->weight.grad()[0][0].template item<float>(), use_a ? 3.0f : 1.5f);
    }
  });
}

// A guess that was wrong once is not wrong for ever: the backward after waits for the parameter again.
TEST(Graphs, LateOnceThenExpectedAgain) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<Parameters>(4);
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
    const auto messages_of = [&](const std::vector<int>& order) {
      model->zero_grad();
      ddp(order, group->rank() + 1.0).backward();
      EXPECT_TRUE(order.size() < 4 || same_bits(model->p[3].grad(), torch::full({3}, 6.0f)));
      return ddp.last_step().messages;
    };
    messages_of({4, 3, 2, 1});
    for (int step = 0; step < 4; ++step) EXPECT_EQ(messages_of({3, 2, 1}), 4);
    EXPECT_EQ(messages_of({3, 2, 4, 1}), 5) << "its bucket has left: a message more";
    for (int step = 0; step < 3; ++step) EXPECT_EQ(messages_of({3, 2, 4, 1}), 4) << step;
  });
}

// The walk knows before backward what will be silent: nothing waits for it, from the first step on.
TEST(Graphs, FindUnusedParametersWalksTheGraph) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<TwoLayers>();
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0, .find_unused_parameters = true});
    ddp.core().set_tracing(true);
    const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(x).sum().backward();
      EXPECT_FALSE(model->a->weight.grad().defined());
      EXPECT_EQ(model->b->weight.grad()[0][0].template item<float>(), 1.5f);
      // Bucket 0 is b's, which left from its own hook: before the end of the backward.
      std::int64_t launched = 0, hook_end = 0;
      for (const auto& event : ddp.core().take_trace()) {
        if (event.name == "bucket 0") launched = event.end_ns;
        if (event.name == "b.weight") hook_end = event.end_ns;
      }
      EXPECT_GT(launched, 0);
      EXPECT_LE(launched, hook_end);
    }
    // What the graph reaches by another way than forward's outputs comes late, and is right.
    model->zero_grad();
    (ddp(x).sum() + model->a(x).sum()).backward();
    EXPECT_EQ(model->a->weight.grad()[0][0].template item<float>(), 1.5f);
  });
}

TEST(Graphs, OutputsOfAnyTypeAreSearchedForTensors) {
  const Tensor t = torch::ones({1});
  EXPECT_EQ(tensors_in(t).size(), 1u);
  EXPECT_EQ(tensors_in(std::make_tuple(t, 3, std::pair{t, std::string("x")})).size(), 2u);
  EXPECT_EQ(tensors_in(std::vector<std::vector<Tensor>>{{t, t}, {t}}).size(), 3u);
  EXPECT_EQ(tensors_in(std::map<std::string, Tensor>{{"a", t}}).size(), 1u);
  EXPECT_EQ(tensors_in(Opaque{t, ""}).size(), 0u);
}

TEST(Graphs, StrictNamesTheUnusedParameterOnEveryRank) {
  const auto failures = failures_of(2, [&](auto group) {
    auto model = std::make_shared<TwoLayers>();
    DistributedDataParallel ddp(model, group, {.strict = true});
    Tensor loss = ddp(torch::ones({1, 4})).sum();
    if (group->rank() == 0) loss = loss + model->a(torch::ones({1, 4})).sum();
    loss.backward();
  });
  for (const auto& f : failures) EXPECT_NE(f.find("'a.weight'"), std::string::npos) << f;
  EXPECT_EQ(failures[0], failures[1]);
}

// B7: two forwards, then two backwards.
TEST(Graphs, TwoForwardsThenTwoBackwards) {
  on_ranks(2, [&](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    Tensor a = ddp(f.x).sum(), b = ddp(2 * f.x).sum();
    a.backward();
    b.backward();
    EXPECT_EQ(f.grad(), 4.5);
  });
}

TEST(Graphs, TwoForwardsThenTheirBackwardsInTheOtherOrder) {
  for (bool find_unused : {false, true}) {
    on_ranks(2, [&](auto group) {
      Fix f(group);
      DistributedDataParallel ddp(f.model, group, {.find_unused_parameters = find_unused});
      for (int step = 0; step < 3; ++step) {
        f.model->zero_grad();
        Tensor a = ddp(f.x).sum(), b = ddp(2 * f.x).sum();
        b.backward();
        EXPECT_EQ(f.grad(), 3.0) << "step " << step;
        a.backward();
        EXPECT_EQ(f.grad(), 4.5) << "step " << step;
      }
    });
  }
}

TEST(Graphs, InnerModuleCalledPastTheWrapper) {
  on_ranks(2, [&](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    f.model(f.x).sum().backward();
    EXPECT_EQ(f.grad(), 1.5);
  });
}

struct ReturnsStruct : torch::nn::Module {
  torch::nn::Linear l{nullptr};
  ReturnsStruct() { l = register_module("l", torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false))); }
  Opaque forward(const Tensor& x, int, const std::string& note) { return {l(x), note}; }
};
TEST(Graphs, ForwardReturnsAStruct) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<ReturnsStruct>();
    DistributedDataParallel ddp(model, group, {.static_graph = true});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      Opaque out = ddp(torch::full({1, 4}, group->rank() + 1.0), 7, "note");
      out.hidden.sum().backward();
      EXPECT_EQ(model->l->weight.grad()[0][0].template item<float>(), 1.5f);
    }
  });
}

// B5: reentrant checkpointing, a backward inside a backward.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, torch::nn::Linear layer) {
    ctx->save_for_backward({x});
    ctx->saved_data["layer"] = reinterpret_cast<std::int64_t>(new torch::nn::Linear(layer));
    at::NoGradGuard no_grad;
    return layer(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    std::unique_ptr<torch::nn::Linear> layer(reinterpret_cast<torch::nn::Linear*>(ctx->saved_data["layer"].toInt()));
    Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    at::AutoGradMode enable(true);
    Tensor y = (*layer)(x);
    torch::autograd::backward({y}, {grads[0]});
    return {x.grad(), Tensor()};
  }
};

struct Checkpointed : torch::nn::Module {
  torch::nn::Linear l{nullptr}, o{nullptr};
  Checkpointed() {
    l = register_module("l", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    o = register_module("o", torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false)));
    at::NoGradGuard no_grad;
    l->weight.copy_(2 * torch::eye(4));
    o->weight.fill_(1);
  }
  Tensor forward(const Tensor& x) { return o(Checkpoint::apply(Checkpoint::apply(x, l), l)); }
};

TEST(Graphs, ReentrantCheckpointsFireTwice) {
  for (double cap : {0.0, 25.0}) {
    on_ranks(2, [&](auto group) {
      auto model = std::make_shared<Checkpointed>();
      DistributedDataParallel ddp(model, group, {.bucket_cap_mb = cap});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        Tensor x = torch::full({1, 4}, group->rank() + 1.0).requires_grad_();
        ddp(x).sum().backward();
        EXPECT_EQ(model->l->weight.grad()[0][0].template item<float>(), 6.0f) << "cap " << cap << " step " << step;
        EXPECT_EQ(model->o->weight.grad()[0][0].template item<float>(), 6.0f);
      }
    });
  }
}

// All parameters inside the checkpoints: the outer backward fires no hook of ours at all.
struct OnlyCheckpointed : torch::nn::Module {
  torch::nn::Linear l{nullptr};
  OnlyCheckpointed() {
    l = register_module("l", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    at::NoGradGuard no_grad;
    l->weight.copy_(2 * torch::eye(4));
  }
  Tensor forward(const Tensor& x) { return Checkpoint::apply(Checkpoint::apply(x, l), l); }
};

TEST(Graphs, EveryParameterInsideReentrantCheckpoints) {
  on_ranks(2, [&](auto group) {
    auto model = std::make_shared<OnlyCheckpointed>();
    DistributedDataParallel ddp(model, group);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      Tensor x = torch::full({1, 4}, group->rank() + 1.0).requires_grad_();
      ddp(x).sum().backward();
      EXPECT_EQ(model->l->weight.grad()[0][0].template item<float>(), 6.0f) << "step " << step;
      EXPECT_EQ(ddp.last_step().step, step);
    }
  });
}

TEST(Graphs, AutogradGradDoesNotSynchronise) {
  on_ranks(2, [&](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    Tensor loss = ddp(f.x).sum();
    auto g = torch::autograd::grad({loss}, {f.model->weight}, {}, /*retain_graph=*/true);
    EXPECT_EQ(g[0][0][0].template item<float>(), group->rank() + 1.0f);
    EXPECT_FALSE(f.model->weight.grad().defined());
    loss.backward();
    EXPECT_EQ(f.grad(), 1.5);
  });
}

TEST(Graphs, CreateGraphKeepsTheMean) {
  on_ranks(2, [&](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    for (int step = 0; step < 2; ++step) {
      ddp(f.x).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      EXPECT_EQ(f.grad(), 1.5 * (step + 1));
    }
  });
}

TEST(Graphs, SharedWeightFiresOnce) {
  on_ranks(2, [&](auto group) {
    Fix f(group);
    DistributedDataParallel ddp(f.model, group);
    (ddp(f.x) + ddp(3 * f.x)).sum().backward();
    EXPECT_EQ(f.grad(), 6.0);
    EXPECT_EQ(ddp.last_step().messages, 1);
  });
}

}  // namespace
}  // namespace unisono
