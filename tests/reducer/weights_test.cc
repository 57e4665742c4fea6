// To which backward a weight belongs, and what may not happen in a weighted window.
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

// One weight on rank r: r + 1 samples whose local mean gradient is x.
struct Weighted {
  explicit Weighted(const std::shared_ptr<ProcessGroup>& group) : f(group), ddp(f.model, group), n(group->rank() + 1) {}
  Tensor loss(double scale = 1) { return ddp.weight(ddp(scale * f.x).sum(), n); }
  Fix f;
  DistributedDataParallel<torch::nn::LinearImpl> ddp;
  int n;
};

// The local mean gradients are 1 and 2, of 1 and 2 samples.
constexpr double kMean = 5.0 / 3;
void expect_mean(const Weighted& w, double times = 1) { EXPECT_NEAR(w.f.grad(), times * kMean, 1e-6); }  // f32

// Two losses weighted before either is differentiated: each backward has its own weight.
TEST(Weights, BelongToTheBackwardOfTheirLoss) {
  on_ranks(2, [](auto group) {
    Weighted w(group);
    const Tensor a = w.loss(), b = w.loss(3);
    a.backward();
    expect_mean(w);
    b.backward();
    expect_mean(w, 4);
  });
}

TEST(Weights, OfALossThatIsNeverDifferentiatedCountForNothing) {
  on_ranks(2, [](auto group) {
    Weighted w(group);
    if (group->rank() == 1) w.loss();
    torch::autograd::grad({w.loss()}, {w.f.model->weight});
    w.loss().backward();
    expect_mean(w);
  });
}

TEST(Weights, RetainGraphTwice) {
  on_ranks(2, [](auto group) {
    Weighted w(group);
    const Tensor loss = w.loss();
    loss.backward({}, true);
    expect_mean(w);
    loss.backward();
    expect_mean(w, 2);
    w.f.model->zero_grad();
    const Tensor again = w.loss();
    {
      auto skip = w.ddp.no_sync();
      again.backward({}, true);
    }
    again.backward();
    expect_mean(w);
  });
}

// An exception before the backward reaches a parameter, and one under no_sync: the weight is not counted twice.
TEST(Weights, AreForgottenWithTheirBackward) {
  on_ranks(2, [](auto group) {
    Weighted w(group);
    Tensor loss = w.ddp(w.f.x).sum();
    loss.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("mine"); });
    if (group->rank() == 0) EXPECT_THROW(w.ddp.weight(loss, 1).backward(), std::runtime_error);
    w.loss().backward();
    expect_mean(w);
    w.f.model->zero_grad();
    {
      auto skip = w.ddp.no_sync();
      if (group->rank() == 1) {
        Tensor x = w.f.x.clone().requires_grad_();
        x.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("mine"); });
        EXPECT_THROW(w.ddp.weight(w.ddp(x).sum(), 2).backward(), std::runtime_error);
      }
      w.f.model->zero_grad();
    }
    w.loss().backward();
    expect_mean(w);
  });
}

// zero_grad in the middle of a window begins it anew: neither the dropped micro-batch nor what was there before it
// remains.
TEST(Weights, ZeroGradInAWindow) {
  on_ranks(2, [](auto group) {
    Weighted w(group);
    w.loss().backward();  // stays in .grad when the window opens
    {
      auto skip = w.ddp.no_sync();
      w.loss(7).backward();
    }
    w.f.model->zero_grad();
    w.loss().backward();
    expect_mean(w);
  });
}

TEST(Weights, EditsInAWindowAreRefused) {
  for (bool clear : {false, true}) {
    const auto failures = failures_of(2, [&](auto group) {
      Weighted w(group);
      auto extra = torch::nn::Linear(4, 1);
      {
        auto skip = w.ddp.no_sync();
        w.loss().backward();
      }
      clear ? w.f.model->zero_grad(/*set_to_none=*/false) : (void)w.f.model->weight.mutable_grad().mul_(2);
      w.loss().backward();
    });
    for (const auto& failure : failures)
      EXPECT_NE(failure.find("'weight' was changed between two backwards"), std::string::npos) << failure;
  }
}

TEST(Weights, MixedWithoutAreRefused) {
  on_ranks(2, [](auto group) {
    Weighted w(group);
    {
      auto skip = w.ddp.no_sync();
      w.ddp(w.f.x).sum().backward();
    }
    EXPECT_THROW(w.loss().backward(), Error);
    w.f.model->zero_grad();
    {
      auto skip = w.ddp.no_sync();
      w.loss().backward();
    }
    EXPECT_THROW(w.ddp(w.f.x).sum().backward(), Error);
    w.ddp.sync_grads();
    expect_mean(w);
  });
}

// A sum of weighted losses, each of its own layers: the first buckets leave before the last weight is known.
TEST(Weights, ASumOfLosses) {
  for (double cap : {0.0, 25.0}) {
    on_ranks(2, [&](auto group) {
      torch::nn::Sequential model;
      for (int i = 0; i < 3; ++i) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false)));
      DistributedDataParallel ddp(model, group, {.bucket_cap_mb = cap});
      const Tensor x = torch::full({1, 4}, group->rank() + 1.0);
      const int n = group->rank() + 1;
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        Tensor sum = torch::zeros({});
        for (int i = 0; i < 3; ++i)
          sum = sum +
                ddp.weight(model[static_cast<std::size_t>(i)]->template as<torch::nn::Linear>()->forward(x).sum(), n);
        sum.backward();
        // Each loss counts its own samples: three times (1 + 2) samples in the denominator.
        for (const Tensor& p : model->parameters())
          EXPECT_NEAR(p.grad()[0][0].template item<double>(), kMean / 3, 1e-6);
      }
    });
  }
}

// What gradients become lazily must arrive as it is.
TEST(Weights, ConjugatesArrive) {
  on_ranks(2, [](auto group) {
    struct Complex : torch::nn::Module {
      Tensor w = register_parameter("w", torch::ones({3}, at::kComplexFloat));
      Tensor forward(double s) {
        return at::real(w.conj() * torch::full({3}, c10::complex<float>(0, static_cast<float>(s)))).sum();
      }
    };
    auto ours = std::make_shared<Complex>(), alone = std::make_shared<Complex>();
    DistributedDataParallel ddp(ours, group);
    ddp(group->rank() + 1.0).backward();
    alone->forward(1.5).backward();
    EXPECT_TRUE(torch::equal(ours->w.grad(), alone->w.grad().resolve_conj()));
  });
}

// sync_grads says nothing about which parameters are silent, nor in which order gradients come.
TEST(Weights, SyncGradsTeachesNothing) {
  on_ranks(2, [](auto group) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
    for (int i = 0; i < 4; ++i) {
      {
        auto skip = ddp.no_sync();
        ddp(torch::ones({1, 4})).sum().backward();
      }
      ddp.sync_grads();
    }
    ddp(torch::ones({1, 4})).sum().backward();
    const int messages = ddp.last_step().messages;
    EXPECT_EQ(messages, 4);  // no late gradients
  });
}

// After an abandoned backward all ranks hold the same: no gradients.
TEST(Weights, NothingIsLeftOfAFailedStep) {
  on_ranks(2, [](auto group) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 1));
    DistributedDataParallel ddp(model, group);
    Tensor x = torch::ones({1, 4});
    if (group->rank() == 1) {
      x.requires_grad_();
      x.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("mine"); });
    }
    EXPECT_ANY_THROW(ddp(x).sum().backward());
    for (const Tensor& p : model->parameters()) EXPECT_FALSE(p.grad().defined());
  });
}

}  // namespace
}  // namespace unisono
