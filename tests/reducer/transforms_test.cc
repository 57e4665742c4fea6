// Gradient transforms: numbers, bytes, state, failures.
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

struct Matrix : torch::nn::Module {
  Matrix(int n, int m) : weight(register_parameter("weight", torch::zeros({n, m}))) {}
  // The gradient is `g` itself.
  Tensor forward(const Tensor& g) { return (weight * g).sum(); }
  Tensor weight;
};

Tensor random(std::int64_t seed, at::IntArrayRef sizes) {
  return torch::randn(sizes, at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed)), at::TensorOptions());
}

// F3: four ranks of 40,000 in f16: a sum first would be infinite.
TEST(Transforms, HalfDividesFirst) {
  for (bool bf16 : {false, true}) {
    on_ranks(4, [&](auto group) {
      auto m = std::make_shared<Matrix>(8, 8);
      DistributedDataParallel ddp(m, group);
      ddp.core().set_transform(bf16 ? bf16_transform() : f16_transform());
      ddp(torch::full({8, 8}, bf16 ? 40960.0 : 40000.0)).backward();
      EXPECT_TRUE(torch::equal(m->weight.grad(), torch::full({8, 8}, bf16 ? 40960.0f : 40000.0f)));
    });
  }
}

// Half the bytes of f32 for f16 and bf16, a quarter plus one scale for int8 on two ranks, measured where they are sent.
TEST(Transforms, BytesOnTheWire) {
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<Matrix>(64, 64);
    DistributedDataParallel ddp(m, group, {.bucket_cap_mb = 25});
    const auto bytes_with = [&](std::shared_ptr<GradientTransform> transform) {
      ddp.core().set_transform(std::move(transform));
      m->zero_grad();
      ddp(random(group->rank(), {64, 64})).backward();
      return ddp.last_step().bytes;
    };
    constexpr std::int64_t n = 64 * 64;
    EXPECT_EQ(bytes_with(nullptr), 4 * n);
    EXPECT_EQ(bytes_with(f16_transform()), 2 * n);
    EXPECT_EQ(bytes_with(bf16_transform()), 2 * n);
    EXPECT_EQ(bytes_with(int8_transform()), n + 4);
    EXPECT_EQ(bytes_with(power_sgd_transform({.rank = 2, .start_step = 0})), 4 * 2 * (64 + 64));
    EXPECT_EQ(bytes_with(post_local_sgd_transform(0)), 0);
  });
}

// What autograd computes for a Linear, a Tanh and a Linear with these parameters, in double and past all wrappers.
std::vector<Tensor> gradients_of(const std::vector<Tensor>& parameters, const Tensor& x) {
  std::vector<Tensor> p;
  for (const Tensor& t : parameters) p.push_back(t.detach().to(torch::kDouble).requires_grad_());
  const Tensor hidden = torch::nn::functional::linear(x.to(torch::kDouble), p[0], p[1]).tanh();
  return torch::autograd::grad({torch::nn::functional::linear(hidden, p[2], p[3]).pow(2).mean()}, p);
}

TEST(Transforms, SameBitsOnAllRanksAndNearTheMean) {
  for (int ranks : {2, 3}) {
    on_ranks(ranks, [&](auto group) {
      for (auto& transform : {f16_transform(), bf16_transform(), int8_transform()}) {
        torch::manual_seed(3);
        torch::nn::Sequential model(torch::nn::Linear(20, 30), torch::nn::Tanh(), torch::nn::Linear(30, 7));
        double largest = 0;  // of all gradients so far
        DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.001});
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        ddp.core().set_transform(transform);
        for (int step = 0; step < 5; ++step) {
          optimizer.zero_grad();
          std::vector<Tensor> sums;
          for (const Tensor& p : model->parameters()) sums.push_back(torch::zeros_like(p, torch::kDouble));
          for (int rank = 0; rank < ranks; ++rank) {
            const auto gradients = gradients_of(model->parameters(), random(10 * step + rank, {4, 20}));
            for (std::size_t i = 0; i < sums.size(); ++i) {
              sums[i] += gradients[i];
              largest = std::max(largest, gradients[i].abs().max().template item<double>());
            }
          }
          ddp(random(10 * step + group->rank(), {4, 20})).pow(2).mean().backward();
          // 16 bits: half an epsilon where each rank's part is rounded and half where the sum is. int8: steps of
          // largest / 127, half of one in what is rounded now and half in what error feedback adds from before, which
          // also makes the largest value, and so the step, up to 1/253 larger.
          const double tolerance = transform->name() == "f16"    ? std::ldexp(1.0, -10)
                                   : transform->name() == "bf16" ? std::ldexp(1.0, -7)
                                                                 : 1.01 / 127;
          for (std::size_t i = 0; i < sums.size(); ++i) {
            const Tensor difference = model->parameters()[i].grad() - sums[i] / ranks;
            EXPECT_LE(difference.abs().max().template item<double>(), tolerance * largest)
                << transform->name() << ", step " << step << ", parameter " << i;
          }
          optimizer.step();
          EXPECT_TRUE(ddp.replicas_identical()) << transform->name();
        }
      }
    });
  }
}

// Weights stay true averages behind transforms, those that yield means and those that yield sums.
TEST(Transforms, WeightsAreOutsideWhatTheySee) {
  struct Sum final : GradientTransform {
    std::string name() const override { return "sum"; }
    Yields yields() const override { return Yields::sum; }
    TransformTask run(GradientBucket bucket, GradientChannel& channel) override {
      seen = bucket.buffer.numel();
      co_await channel.all_reduce(bucket.buffer);
    }
    std::int64_t seen = 0;
  };
  on_ranks(2, [](auto group) {
    for (int which = 0; which < 2; ++which) {
      auto m = std::make_shared<Matrix>(1, 16);
      DistributedDataParallel ddp(m, group);
      auto sum = std::make_shared<Sum>();
      ddp.core().set_transform(which == 0 ? std::shared_ptr<GradientTransform>(sum) : bf16_transform());
      // Five samples of 1 on rank 0, one of 10 on rank 1: 15 / 6 = 2.5.
      ddp.weight(ddp(torch::full({1, 16}, group->rank() == 0 ? 1.0 : 10.0)), group->rank() == 0 ? 5 : 1).backward();
      EXPECT_TRUE(torch::equal(m->weight.grad(), torch::full({1, 16}, 2.5f)));
      if (which == 0) EXPECT_EQ(sum->seen, 16);
      m->zero_grad();
      ddp(torch::full({1, 16}, group->rank() + 1.0)).backward();
      EXPECT_TRUE(torch::equal(m->weight.grad(), torch::full({1, 16}, 1.5f)));
      m->zero_grad();
      ddp.weight(ddp(torch::full({1, 16}, 1.0)), 0).backward();
      EXPECT_TRUE(torch::equal(m->weight.grad(), torch::zeros({1, 16})));
    }
  });
}

// A gradient of rank one comes through whole; error feedback brings what was lost later: the sum over steps approaches
// the true sum, without it it does not.
TEST(Transforms, PowerSGDLosesNothingForEver) {
  on_ranks(2, [](auto group) {
    auto m = std::make_shared<Matrix>(32, 24);
    DistributedDataParallel ddp(m, group);
    ddp.core().set_transform(power_sgd_transform({.rank = 1, .start_step = 0}));
    const Tensor outer = random(1, {32, 1}).mm(random(2, {1, 24}));
    ddp(outer * (group->rank() + 1)).backward();
    // f32 products of factors: relative 1e-6 of the largest element times the length of the sums.
    EXPECT_TRUE(torch::allclose(m->weight.grad(), outer * 1.5, 1e-4, 1e-4));

    const auto missing_after = [&](bool feedback) {
      ddp.core().set_transform(power_sgd_transform({.rank = 2, .start_step = 0, .error_feedback = feedback}));
      const Tensor g = random(5 + group->rank(), {32, 24}), mean = (random(5, {32, 24}) + random(6, {32, 24})) / 2;
      Tensor sum = torch::zeros({32, 24});
      constexpr int steps = 40;
      for (int step = 0; step < steps; ++step) {
        m->zero_grad();
        ddp(g).backward();
        sum += m->weight.grad();
      }
      return (sum / steps - mean).norm().template item<double>() / mean.norm().template item<double>();
    };
    const double with = missing_after(true), without = missing_after(false);
    EXPECT_LT(with, 0.5 * without);
  });
}

// Stopped and gone on from its state, a run ends with the same bits.
TEST(Transforms, StateIsSavedAndRestored) {
  on_ranks(2, [](auto group) {
    for (auto make :
         {+[] { return power_sgd_transform({.rank = 2, .start_step = 0}); }, +[] { return int8_transform(); }}) {
      const auto run = [&](int steps, const std::vector<NamedTensor>& state, const Tensor& weight) {
        auto m = std::make_shared<Matrix>(16, 16);
        if (weight.defined()) m->weight.data().copy_(weight);
        DistributedDataParallel ddp(m, group);
        torch::optim::SGD optimizer(m->parameters(), 0.1);
        auto transform = make();
        transform->load_state(state);
        ddp.core().set_transform(transform);
        for (int step = 0; step < steps; ++step) {
          optimizer.zero_grad();
          ddp(random(group->rank(), {16, 16}) + m->weight.detach()).backward();
          optimizer.step();
        }
        std::vector<NamedTensor> saved;
        for (const NamedTensor& t : transform->state()) saved.push_back({t.name, t.tensor.clone()});
        return std::pair{m->weight.detach().clone(), saved};
      };
      const auto half = run(3, {}, {});
      EXPECT_FALSE(half.second.empty());
      const auto whole = run(3, half.second, half.first), without = run(3, {}, half.first);
      EXPECT_FALSE(same_bits(whole.first, without.first));
      EXPECT_TRUE(same_bits(whole.first, run(3, half.second, half.first).first));
      EXPECT_THROW(make()->load_state({{"nonsense", torch::zeros(1)}}), Error);
    }
    EXPECT_THROW(f16_transform()->load_state({{"error.weight", torch::zeros(1)}}), Error);
  });
}

// Infinities and NaN arrive.
TEST(Transforms, NotANumberArrives) {
  on_ranks(2, [](auto group) {
    for (auto& transform : {f16_transform(), bf16_transform(), int8_transform()}) {
      auto m = std::make_shared<Matrix>(2, 8);
      DistributedDataParallel ddp(m, group);
      ddp.core().set_transform(transform);
      Tensor g = torch::ones({2, 8});
      if (group->rank() == 1) g[0][0] = std::numeric_limits<float>::quiet_NaN();
      ddp(g).backward();
      EXPECT_TRUE(m->weight.grad()[0][0].isnan().template item<bool>()) << transform->name();
    }
  });
}

struct Throws final : GradientTransform {
  std::string name() const override { return "throws"; }
  TransformTask run(GradientBucket bucket, GradientChannel& channel) override {
    if (channel.rank() == 1) throw std::runtime_error("out of luck");
    co_await channel.all_reduce(bucket.buffer);
  }
};

// One rank's transform fails: every rank hears which one, and why.
TEST(Transforms, FailureIsNamedOnEveryRank) {
  const auto failures = failures_of(2, [](auto group) {
    auto m = std::make_shared<Matrix>(2, 8);
    DistributedDataParallel ddp(m, group);
    ddp.core().set_transform(std::make_shared<Throws>());
    ddp(torch::ones({2, 8})).backward();
  });
  for (const std::string& failure : failures) {
    EXPECT_NE(failure.find("rank 1: the gradient transform 'throws' failed in bucket 0: out of luck"),
              std::string::npos)
        << failure;
  }
}

// Unused on all ranks, unused on one, late, abandoned: as without a transform.
TEST(Transforms, GraphsOfAllKinds) {
  on_ranks(2, [](auto group) {
    struct Two : torch::nn::Module {
      Tensor a = register_parameter("a", torch::ones({8})), b = register_parameter("b", torch::ones({8}));
      Tensor forward(bool use_b) { return use_b ? (a * b).sum() : a.sum(); }
    };
    auto m = std::make_shared<Two>();
    DistributedDataParallel ddp(m, group, {.bucket_cap_mb = 0});
    ddp.core().set_transform(bf16_transform());
    ddp(false).backward();
    EXPECT_FALSE(m->b.grad().defined());
    EXPECT_EQ(m->a.grad()[0].template item<float>(), 1);
    m->zero_grad();
    ddp(group->rank() == 1).backward();
    EXPECT_EQ(m->b.grad()[0].template item<float>(), 0.5);
    m->zero_grad();
    Tensor loss = ddp(true);
    loss.backward({}, /*keep_graph=*/true);
    loss.backward();
    EXPECT_EQ(m->a.grad()[0].template item<float>(), 2);
  });
}

}  // namespace
}  // namespace unisono
