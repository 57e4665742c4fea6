// Optimizers that step inside backward.
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

// Ranks are threads and share torch's generator: a generator of its own makes every net the same.
torch::nn::Sequential net() {
  torch::nn::Sequential n(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 4));
  auto generator = at::detail::createCPUGenerator(1);
  at::NoGradGuard no_grad;
  for (auto& p : n->parameters()) p.normal_(0, 0.3, generator);
  return n;
}

Tensor inputs(int rank, int step) {
  return torch::randn({5, 6}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * step + rank)),
                      at::TensorOptions());
}

auto sgd = [](std::vector<Tensor> p) {
  return std::make_unique<torch::optim::SGD>(std::move(p), torch::optim::SGDOptions(0.1).momentum(0.9));
};

// The same bits as an optimizer that steps after backward, whatever the buckets and views, with accumulation and
// weights.
TEST(StepInBackward, SameBitsAsAfterwards) {
  for (bool views : {true, false}) {
    for (double cap : {0.0, 25.0}) {
      for (bool accumulate : {false, true}) {
        on_ranks(2, [&](auto group) {
          auto inside = net(), after = net();
          DistributedDataParallelOptions options{.bucket_cap_mb = cap, .gradient_as_bucket_view = views};
          DistributedDataParallel a(inside, group, options), b(after, group, options);
          torch::optim::SGD optimizer(after->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
          a.step_in_backward(sgd);
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            for (auto* ddp : {&a, &b}) {
              if (accumulate) {
                auto skip = ddp->no_sync();
                ddp->weight((*ddp)(inputs(group->rank(), step + 50)).pow(2).mean(), 3).backward();
                ddp->core().set_sync(true);
                ddp->weight((*ddp)(inputs(group->rank(), step)).pow(2).mean(), 2 + group->rank()).backward();
              } else {
                (*ddp)(inputs(group->rank(), step)).pow(2).mean().backward();
              }
            }
            optimizer.step();
            EXPECT_FALSE(inside->parameters()[0].grad().defined());
            ASSERT_EQ(a.digest(), b.digest()) << views << cap << accumulate << step;
          }
        });
      }
    }
  }
}

// Buckets are used while backward still runs: the last layer's step comes before the first layer's gradient.
TEST(StepInBackward, HangsOnTheBucket) {
  on_ranks(2, [](auto group) {
    auto model = net();
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
    std::vector<std::string> order;
    ddp.core().set_step_in_backward([&](const std::vector<NamedTensor>& parameters) {
      for (const auto& p : parameters) {
        order.push_back(p.name);
        p.tensor.mutable_grad().reset();
      }
    });
    model->parameters()[0].register_hook([&](const Tensor& g) {
      order.push_back("gradient of the first layer");
      return g;
    });
    for (int step = 0; step < 2; ++step) {
      order.clear();
      ddp(inputs(group->rank(), step)).pow(2).mean().backward();
      ASSERT_EQ(order.size(), 5u);
    }
    // Which buckets are noticed at which hook depends on timing; all are used exactly once.
    EXPECT_NE(std::find(order.begin(), order.end(), "gradient of the first layer"), order.end());
  });
}

TEST(StepInBackward, ClipsInTwoPhases) {
  on_ranks(2, [](auto group) {
    auto inside = net(), after = net();
    DistributedDataParallel a(inside, group), b(after, group);
    torch::optim::SGD optimizer(after->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    a.step_in_backward(sgd, {.max_norm = 0.25});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      a(inputs(group->rank(), step)).pow(2).sum().backward();
      b(inputs(group->rank(), step)).pow(2).sum().backward();
      torch::nn::utils::clip_grad_norm_(after->parameters(), 0.25);
      optimizer.step();
      // The norm is summed in f64 here, in f32 there.
      for (std::size_t i = 0; i < 4; ++i)
        EXPECT_TRUE(torch::allclose(inside->parameters()[i], after->parameters()[i], 1e-5, 1e-7));
      EXPECT_TRUE(a.replicas_identical());
    }
  });
}

TEST(StepInBackward, WithATransform) {
  on_ranks(2, [](auto group) {
    auto model = net();
    DistributedDataParallel ddp(model, group);
    ddp.step_in_backward(sgd);
    ddp.core().set_transform(bf16_transform());
    const std::string before = ddp.digest();
    ddp(inputs(group->rank(), 0)).pow(2).mean().backward();
    EXPECT_NE(ddp.digest(), before);
    EXPECT_TRUE(ddp.replicas_identical());
    EXPECT_FALSE(model->parameters()[0].grad().defined());
  });
}

// Unused everywhere: not touched, momentum or not. Used on one rank: stepped on all.
TEST(StepInBackward, UnusedParametersRest) {
  on_ranks(2, [](auto group) {
    struct Two : torch::nn::Module {
      Tensor a = register_parameter("a", torch::ones({3})), b = register_parameter("b", torch::ones({3}));
      Tensor forward(bool use_b) { return use_b ? (a * b).sum() : a.sum(); }
    };
    auto m = std::make_shared<Two>();
    DistributedDataParallel ddp(m, group, {.bucket_cap_mb = 0});
    ddp.step_in_backward(sgd);
    ddp(group->rank() == 0).backward();
    const Tensor b = m->b.detach().clone();
    EXPECT_FALSE(torch::equal(b, torch::ones({3})));
    ddp(false).backward();
    EXPECT_TRUE(same_bits(m->b, b));
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

TEST(StepInBackward, RefusedWhereItCannotBeRight) {
  const auto failures = failures_of(2, [](auto group) {
    auto m = net();
    DistributedDataParallel ddp(m, group, {.bucket_cap_mb = 0});
    ddp.step_in_backward(sgd);
    Tensor loss = ddp(inputs(group->rank(), 0)).pow(2).mean() + 0;
    // A nested backward through the same parameters in the middle of the outer one.
    struct Twice : torch::autograd::Function<Twice> {
      static Tensor forward(torch::autograd::AutogradContext* c, const Tensor& x, const Tensor& w) {
        c->save_for_backward({w});
        return x.clone();
      }
      static torch::autograd::variable_list backward(torch::autograd::AutogradContext* c,
                                                     torch::autograd::variable_list g) {
        at::AutoGradMode on(true);
        auto w = c->get_saved_variables()[0];
        (w * 1).sum().backward();
        (w * 1).sum().backward();
        return {g[0], Tensor()};
      }
    };
    auto w = m->parameters()[3];
    Twice::apply(loss, w).backward();
  });
  for (const auto& failure : failures) EXPECT_NE(failure, "");
  on_ranks(2, [](auto group) {
    auto m = net();
    DistributedDataParallel ddp(m, group);
    {
      auto skip = ddp.no_sync();
      ddp(inputs(0, 0)).sum().backward();
    }
    EXPECT_THROW(ddp.step_in_backward(sgd), Error);
    ddp.sync_grads();
  });
}

struct WithHead : torch::nn::Module {
  torch::nn::Linear body = register_module("body", torch::nn::Linear(6, 6));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(6, 2));
  Tensor forward(const Tensor& x) { return head(body(x)); }
};

// An optimizer is its parameter's, not its name's.
TEST(StepInBackward, AReplacedLayerIsStepped) {
  on_ranks(2, [](auto group) {
    auto model = std::make_shared<WithHead>();
    DistributedDataParallel ddp(model, group);
    ddp.step_in_backward(sgd);
    ddp(inputs(group->rank(), 0)).sum().backward();
    model->head = model->replace_module("head", torch::nn::Linear(6, 2));
    ddp(inputs(group->rank(), 1)).sum().backward();
    const Tensor before = model->head->weight.detach().clone();
    ddp(inputs(group->rank(), 2)).sum().backward();
    EXPECT_FALSE(torch::equal(before, model->head->weight));
    EXPECT_TRUE(ddp.replicas_identical());
  });
}

TEST(StepInBackward, ANormThatIsNoneIsRefused) {
  on_ranks(1, [](auto group) {
    auto model = net();
    DistributedDataParallel ddp(model, group);
    EXPECT_THROW(ddp.step_in_backward(sgd, {.max_norm = -1.0}), Error);
    EXPECT_THROW(ddp.step_in_backward(sgd, {.max_norm = NAN}), Error);
  });
}

}  // namespace
}  // namespace unisono
