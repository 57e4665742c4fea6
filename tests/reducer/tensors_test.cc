// Gradients of every kind of tensor, and the same bits whatever the buckets.
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

struct Bag : torch::nn::Module {
  std::vector<Tensor> p;
  Bag() {
    const auto add = [&](const char* name, Tensor t) { p.push_back(register_parameter(name, std::move(t))); };
    add("f32", torch::ones({3, 5}));
    add("scalar", torch::ones({}));
    add("empty", torch::ones({0, 4}));
    add("f64", torch::ones({7}, torch::kFloat64));
    add("bf16", torch::ones({9}, torch::kBFloat16));
    add("f16", torch::ones({33}, torch::kFloat16));
    add("c64", torch::ones({5}, torch::kComplexFloat));
    add("channels_last", torch::ones({2, 3, 4, 5}).to(at::MemoryFormat::ChannelsLast));
    add("transposed", torch::ones({4, 6}).t());
    add("expanded", torch::ones({4, 1}).repeat({1, 3}));
  }
  // The gradient of element i of each parameter is scale * (i % 4), real and imaginary alike.
  Tensor forward(double scale) {
    Tensor loss = torch::zeros({});
    for (auto& t : p) {
      Tensor real = t.is_complex() ? at::view_as_real(t) : t;
      Tensor factor = torch::arange(real.numel()).remainder(4).to(torch::kFloat64).view(real.sizes()) * scale;
      loss = loss + (real.to(torch::kFloat64) * factor).sum().to(torch::kFloat32);
    }
    return loss;
  }
};

TEST(Tensors, EveryDtypeShapeAndLayout) {
  for (double cap : {0.0, 0.0001, 25.0}) {
    for (bool views : {true, false}) {
      on_ranks(2, [&](auto group) {
        auto model = std::make_shared<Bag>();
        DistributedDataParallel ddp(model, group, {.bucket_cap_mb = cap, .gradient_as_bucket_view = views});
        for (int step = 0; step < 3; ++step) {
          model->zero_grad();
          ddp(group->rank() + 1.0).backward();
          for (auto& item : model->named_parameters()) {
            const Tensor& t = item.value();
            ASSERT_TRUE(t.grad().defined()) << item.key();
            EXPECT_EQ(t.grad().strides(), t.strides()) << item.key();
            Tensor real = t.is_complex() ? at::view_as_real(t.grad()) : t.grad();
            Tensor expected =
                (torch::arange(real.numel()).remainder(4).view(real.sizes()) * 1.5).to(real.scalar_type());
            EXPECT_TRUE(torch::equal(real, expected)) << item.key() << "\n" << real;
          }
        }
      });
    }
  }
}

// The gradient of a parameter used conjugated arrives as a lazy conjugate: its memory holds the numbers not conjugated.
TEST(Tensors, LazyConjugates) {
  for (bool views : {true, false}) {
    on_ranks(2, [&](auto group) {
      struct Conjugated : torch::nn::Module {
        Tensor w;
        Conjugated() { w = register_parameter("w", torch::ones({3}, torch::kComplexFloat)); }
        Tensor forward(double scale) {
          return at::imag(w.conj() * c10::complex<float>(static_cast<float>(scale), 0)).sum();
        }
      };
      auto model = std::make_shared<Conjugated>();
      DistributedDataParallel ddp(model, group, {.gradient_as_bucket_view = views});
      for (int step = 1; step <= 3; ++step) {
        ddp(group->rank() + 1.0).backward();
        const Tensor grad = model->w.grad().resolve_conj();
        EXPECT_EQ(at::view_as_real(grad)[0][1].template item<float>(), -1.5f * step) << "views " << views;
      }
    });
  }
}

// E8: four ranks with 1 and three times 2^-9 in bf16; only sums in f32 see the small ones.
TEST(Tensors, HalvesAreSummedInFloat) {
  for (auto dtype : {torch::kBFloat16, torch::kFloat16}) {
    on_ranks(4, [&](auto group) {
      struct One : torch::nn::Module {
        Tensor w;
        explicit One(at::ScalarType t) { w = register_parameter("w", torch::zeros({100}, t)); }
        Tensor forward(const Tensor& g) { return (w * g).sum(); }
      };
      auto model = std::make_shared<One>(dtype);
      DistributedDataParallel ddp(model, group);
      const double small = dtype == torch::kBFloat16 ? 1.0 / 512 : 1.0 / 4096;
      ddp(torch::full({100}, group->rank() == 0 ? 1.0 : small, dtype)).backward();
      const Tensor expected = torch::full({100}, static_cast<float>((1.0 + 3 * small) / 4)).to(dtype);
      EXPECT_TRUE(same_bits(model->w.grad(), expected)) << model->w.grad()[0];
    });
  }
}

// K2: values scaled so that the order of summation matters; bucket caps, views, overlap and runs must not.
TEST(Tensors, SameBitsWhateverTheBuckets) {
  for (int world : {2, 3, 4, 5}) {
    std::vector<std::string> digests;
    for (double cap : {1.0 / 1024, 1.0, 25.0}) {
      for (int run = 0; run < 3; ++run) {
        std::string digest;
        on_ranks(world, [&](auto group) {
          torch::nn::Sequential model(torch::nn::Linear(64, 96), torch::nn::Tanh(), torch::nn::Linear(96, 700),
                                      torch::nn::Tanh(), torch::nn::Linear(700, 3));
          {
            // Its own generator: ranks are threads here and would take turns at the default one.
            at::NoGradGuard no_grad;
            auto initial = at::detail::createCPUGenerator(1);
            for (auto& p : model->parameters()) p.normal_(0, 0.1, initial);
          }
          DistributedDataParallel ddp(model, group,
                                      {.bucket_cap_mb = cap, .gradient_as_bucket_view = run != 1, .overlap = run != 2});
          torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(1e-3).momentum(0.9));
          auto generator = at::detail::createCPUGenerator(17 + group->rank());
          for (int step = 0; step < 4; ++step) {
            const Tensor x = torch::randn({8, 64}, generator) * std::pow(10.0, group->rank() * 3 - 3);
            sgd.zero_grad();
            ddp(x).square().sum().backward();
            sgd.step();
          }
          EXPECT_TRUE(ddp.replicas_identical());
          if (group->rank() == 0) digest = ddp.digest();
        });
        digests.push_back(digest);
      }
    }
    for (const auto& digest : digests) EXPECT_EQ(digest, digests[0]) << "world " << world;
  }
}

TEST(Tensors, NaiveAndSerialGiveTheSame) {
  for (int world : {1, 2}) {
    on_ranks(world, [&](auto group) {
      Fix f(group);
      DistributedDataParallel ddp(f.model, group, {.naive = true});
      for (int step = 0; step < 3; ++step) {
        f.model->zero_grad();
        ddp(f.x).sum().backward();
        EXPECT_EQ(f.grad(), (world + 1) / 2.0);
      }
    });
  }
}

}  // namespace
}  // namespace unisono
