// SyncBatchNorm against torch's BatchNorm in one process on the union of the batches.
#include <unisono/sync_batch_norm.h>

#include "reducer/ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

/// What each rank holds of the union, as [begin, end) samples; ranks are threads, so the test can compute both sides.
std::vector<Tensor> shares_of(const Tensor& whole, const std::vector<std::int64_t>& sizes) {
  return whole.split_with_sizes(sizes);
}

struct Outcome {
  Tensor output, dx, dw, db, mean, var;
};

Outcome in_one_process(const Tensor& x, const Tensor& dy, const torch::nn::BatchNormOptions& options) {
  Tensor input = x.clone().set_requires_grad(true);
  torch::nn::BatchNorm2d norm(options);
  if (options.affine()) {
    at::NoGradGuard no_grad;
    norm->weight.copy_(torch::linspace(-1, 2, options.num_features()));
    norm->bias.copy_(torch::linspace(3, -2, options.num_features()));
  }
  norm->to(x.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat);
  Tensor running_mean = norm->running_mean, running_var = norm->running_var;
  Tensor y =
      torch::batch_norm(input, norm->weight, norm->bias, running_mean, running_var, true, 0.1, options.eps(), false);
  y.backward(dy);
  const auto gradient = [](const Tensor& t) { return t.defined() ? t.grad() : t; };
  return {y.detach(), input.grad(), gradient(norm->weight), gradient(norm->bias), running_mean, running_var};
}

double largest(const Tensor& t) { return t.numel() == 0 ? 0 : t.to(torch::kDouble).abs().max().item<double>(); }

// The largest difference in units of the last place of `scale`.
double distance(const Tensor& a, const Tensor& b, double scale) {
  const auto type = a.scalar_type();
  const double eps = type == torch::kDouble ? 0x1p-52 : type == torch::kFloat ? 0x1p-23 : 0x1p-7;
  return largest(a.to(torch::kDouble) - b.to(torch::kDouble)) / (eps * std::max(1e-30, scale));
}
double distance(const Tensor& a, const Tensor& b) { return distance(a, b, largest(b)); }

struct Case {
  std::vector<std::int64_t> shape;  // of the union
  std::vector<std::int64_t> sizes;  // samples per rank
  torch::ScalarType dtype = torch::kFloat;
  bool channels_last = false;
  bool affine = true;
  double offset = 0;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << "union " << c.shape << " ranks " << c.sizes << " " << c.dtype << (c.channels_last ? " channels_last" : "");
}

class SyncBatchNormEquals : public ::testing::TestWithParam<Case> {};

TEST_P(SyncBatchNormEquals, OneProcess) {
  const Case& c = GetParam();
  torch::manual_seed(7);
  const auto format = c.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  const auto options = torch::nn::BatchNormOptions(c.shape[1]).affine(c.affine);
  Tensor x = (torch::randn(c.shape, torch::kDouble) * 3 + c.offset).to(c.dtype);
  Tensor dy = torch::randn(c.shape, torch::kDouble).to(c.dtype);
  if (c.channels_last) x = x.contiguous(format), dy = dy.contiguous(format);
  const Outcome one = in_one_process(x, dy, options);
  const auto xs = shares_of(x, c.sizes), dys = shares_of(dy, c.sizes);
  const std::size_t world = c.sizes.size();
  std::vector<Outcome> got(world);
  on_ranks(static_cast<int>(world), [&](auto group) {
    const auto r = static_cast<std::size_t>(group->rank());
    SyncBatchNorm norm(options, group);
    if (c.affine) {
      at::NoGradGuard no_grad;
      norm->weight.copy_(torch::linspace(-1, 2, c.shape[1]));
      norm->bias.copy_(torch::linspace(3, -2, c.shape[1]));
    }
    norm->to(c.dtype == torch::kDouble ? torch::kDouble : torch::kFloat);
    Tensor input = xs[r].clone().set_requires_grad(true);
    Tensor y = norm(input);
    EXPECT_EQ(y.scalar_type(), c.dtype);
    EXPECT_EQ(y.suggest_memory_format(), input.suggest_memory_format());
    y.backward(dys[r]);
    got[r] = {y.detach(), input.grad(), {}, {}, norm->running_mean, norm->running_var};
    if (c.affine) got[r].dw = norm->weight.grad(), got[r].db = norm->bias.grad();
  });
  std::vector<Tensor> outputs, dxs;
  for (const auto& g : got) outputs.push_back(g.output), dxs.push_back(g.dx);
  // Torch adds up in f64 where channels lie one after the other, as we always do: one or two roundings apart. Side by
  // side, (N, C) and channels_last, it adds up f32 in f32, and f64 inputs in f64 in both: there it is torch that is
  // off, by a rounding for each doubling of the count.
  const double roundings = c.dtype == torch::kBFloat16 ? 1 : 4;
  const double variance =
      x.to(torch::kDouble).transpose(0, 1).reshape({c.shape[1], -1}).var(1, false).min().item<double>();
  const double steepest = (c.affine ? 2.0 : 1.0) / std::sqrt(variance + options.eps());
  EXPECT_LE(distance(torch::cat(outputs), one.output, std::max(largest(one.output), largest(x) * steepest)), roundings);
  // Three terms of about the size of the incoming gradient, which may cancel.
  EXPECT_LE(distance(torch::cat(dxs), one.dx, largest(dy) * steepest), 3 * roundings);
  for (std::size_t r = 0; r < world; ++r) {
    EXPECT_LE(distance(got[r].mean, one.mean, largest(x)), roundings);
    EXPECT_LE(distance(got[r].var, one.var), roundings);
    EXPECT_TRUE(same_bits(got[r].mean, got[0].mean));
    EXPECT_TRUE(same_bits(got[r].var, got[0].var));
    if (!c.affine) continue;
    Tensor dw = got[0].dw.to(torch::kDouble), db = got[0].db.to(torch::kDouble);
    for (std::size_t o = 1; o < world; ++o) dw = dw + got[o].dw, db = db + got[o].db;
    // Rounded once a rank, where the terms need not cancel yet.
    const double terms = largest(dy.to(torch::kDouble).abs().transpose(0, 1).reshape({c.shape[1], -1}).sum(1));
    const double bound = roundings * static_cast<double>(world);
    EXPECT_LE(distance(dw.to(one.dw.scalar_type()), one.dw, terms * largest(x) * steepest), bound);
    EXPECT_LE(distance(db.to(one.db.scalar_type()), one.db, terms), bound);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, SyncBatchNormEquals,
    ::testing::Values(Case{{8, 5}, {4, 4}}, Case{{8, 5}, {7, 1}}, Case{{6, 3, 7}, {2, 4}}, Case{{6, 3, 4, 5}, {3, 3}},
                      Case{{6, 3, 4, 5}, {3, 3}, torch::kFloat, true},
                      Case{{9, 4, 4, 5}, {0, 5, 4}, torch::kFloat, true}, Case{{5, 3, 2, 3, 4}, {1, 0, 3, 1}},
                      Case{{6, 3, 4, 5}, {2, 4}, torch::kDouble}, Case{{16, 3, 4, 5}, {8, 8}, torch::kBFloat16},
                      Case{{6, 3, 4, 5}, {3, 3}, torch::kFloat, false, false},
                      Case{{64, 3, 9}, {31, 33}, torch::kFloat, false, true, 1000.0},
                      Case{{4, 70, 33, 17}, {1, 1, 1, 1}}, Case{{2, 3}, {1, 1}}, Case{{3, 4}, {0, 3}}));

// The pairwise formula keeps what sums of squares would lose: mean 1e8, variance 1.
TEST(SyncBatchNorm, VarianceSurvivesALargeMean) {
  on_ranks(4, [](auto group) {
    const double side = group->rank() % 2 ? 1.0 : -1.0;
    SyncBatchNorm norm(torch::nn::BatchNormOptions(1).momentum(1.0), group);
    norm->to(torch::kDouble);
    norm(torch::full({2, 1}, 1e8 + side, torch::kDouble));
    EXPECT_EQ(norm->running_mean.template item<double>(), 1e8);
    EXPECT_EQ(norm->running_var.template item<double>(), 8.0 / 7.0);
  });
}

TEST(SyncBatchNorm, RunningStatisticsAsTorchKeepsThem) {
  on_ranks(2, [](auto group) {
    const auto batch = [&](int i) {
      return torch::full({2, 3}, static_cast<double>(i)) * torch::tensor({{1.0}, {-1.0 - group->rank()}});
    };
    const auto whole = [&](int i) {
      return torch::cat({torch::full({2, 3}, static_cast<double>(i)) * torch::tensor({{1.0}, {-1.0}}),
                         torch::full({2, 3}, static_cast<double>(i)) * torch::tensor({{1.0}, {-2.0}})});
    };
    for (std::optional<double> momentum : {std::optional<double>(0.3), std::optional<double>()}) {
      SyncBatchNorm ours(torch::nn::BatchNormOptions(3).momentum(momentum), group);
      torch::nn::BatchNorm1d torchs(torch::nn::BatchNormOptions(3).momentum(momentum));
      for (int i = 1; i < 5; ++i) {
        at::NoGradGuard no_grad;  // statistics are exchanged without gradients too
        EXPECT_TRUE(same_bits(ours(batch(i)), torchs(whole(i)).slice(0, 2 * group->rank(), 2 * group->rank() + 2)));
      }
      EXPECT_TRUE(same_bits(ours->running_mean, torchs->running_mean));
      EXPECT_TRUE(same_bits(ours->running_var, torchs->running_var));
      EXPECT_EQ(ours->num_batches_tracked.template item<std::int64_t>(), 4);
    }
  });
}

TEST(SyncBatchNorm, EvaluationIsLocalAndTorchs) {
  on_ranks(2, [](auto group) {
    for (bool tracked : {true, false}) {
      const auto options = torch::nn::BatchNormOptions(3).track_running_stats(tracked);
      SyncBatchNorm ours(options, group);
      torch::nn::BatchNorm1d torchs(options);
      ours(torch::ones({2, 3}) * group->rank());
      if (tracked) {
        torchs->running_mean.copy_(ours->running_mean);
        torchs->running_var.copy_(ours->running_var);
      }
      ours->eval();
      torchs->eval();
      if (group->rank() == 0) {
        const Tensor x = torch::randn({5, 3});
        EXPECT_TRUE(same_bits(ours(x), torchs(x)));
      }
    }
  });
}

TEST(SyncBatchNorm, TwiceInOneForward) {
  Tensor x = torch::randn({8, 3}, torch::kDouble);
  Tensor whole = x.clone().set_requires_grad(true);
  torch::nn::BatchNorm1d one(3);
  one->to(torch::kDouble);
  one(torch::tanh(one(whole))).pow(3).sum().backward();
  on_ranks(2, [&](auto group) {
    SyncBatchNorm norm(torch::nn::BatchNormOptions(3), group);
    norm->to(torch::kDouble);
    Tensor mine = x.slice(0, 4 * group->rank(), 4 * group->rank() + 4).clone().set_requires_grad(true);
    norm(torch::tanh(norm(mine))).pow(3).sum().backward();
    EXPECT_LE(distance(mine.grad(), whole.grad().slice(0, 4 * group->rank(), 4 * group->rank() + 4)), 16);
  });
}

TEST(SyncBatchNorm, RefusesWhatHasNoVariance) {
  for (const auto& failure : failures_of(2, [](auto group) {
         SyncBatchNorm norm(torch::nn::BatchNormOptions(3), group);
         norm(torch::ones({group->rank(), 3}));
       })) {
    EXPECT_NE(failure.find("all ranks together have 1 values per channel"), std::string::npos) << failure;
  }
}

TEST(SyncBatchNorm, RefusesASecondDerivative) {
  for (bool affine : {true, false}) {
    for (const auto& failure : failures_of(2, [&](auto group) {
           SyncBatchNorm norm(torch::nn::BatchNormOptions(3).affine(affine), group);
           Tensor x = torch::randn({4, 3}).set_requires_grad(true);
           Tensor g = torch::autograd::grad({norm(x).square().sum()}, {x}, {}, true, true)[0];
           g.sum().backward();
         })) {
      EXPECT_NE(failure.find("it has no second derivative"), std::string::npos) << failure;
    }
  }
}

TEST(SyncBatchNorm, ChannelsAreCompared) {
  for (const auto& failure : failures_of(2, [](auto group) {
         SyncBatchNorm norm(torch::nn::BatchNormOptions(3 + group->rank()), group);
         norm(torch::ones({4, 3 + group->rank()}));
       })) {
    EXPECT_NE(failure.find("SyncBatchNorm forward"), std::string::npos) << failure;
    EXPECT_NE(failure.find("mismatch"), std::string::npos) << failure;
  }
}

TEST(SyncBatchNorm, RefusesWhatItCannotNormalise) {
  on_ranks(2, [](auto group) {
    const auto says = [&](const char* part, const auto& body) {
      try {
        body();
        ADD_FAILURE() << "no error: " << part;
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
      }
    };
    SyncBatchNorm norm(torch::nn::BatchNormOptions(3), group);
    says("[3]; it may be (N, C)", [&] { norm(torch::ones({3})); });
    says("dtype Long", [&] { norm(torch::ones({3, 3}, torch::kLong)); });
    says("weight has shape [3] and the input [2, 4]", [&] { norm(torch::ones({2, 4})); });
    says("no dense tensor on the CPU", [&] { norm(torch::ones({2, 3}, torch::kMeta)); });
    says("needs a process group", [&] { SyncBatchNorm(torch::nn::BatchNormOptions(3), nullptr); });
  });
}

struct Net : torch::nn::Module {
  torch::nn::Conv2d a{nullptr}, b{nullptr};
  torch::nn::AnyModule na, nb;
  torch::nn::Linear head{nullptr}, extra{nullptr};
  template <typename Norm>
  Net(Norm first, Norm second) {
    a = register_module("a", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3)));
    register_module("na", first);
    b = register_module("b", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3)));
    register_module("nb", second);
    head = register_module("head", torch::nn::Linear(4, 3));
    na = torch::nn::AnyModule(first);
    nb = torch::nn::AnyModule(second);
    to(torch::kDouble);
  }
  Tensor forward(Tensor x) {
    x = torch::relu(na.forward<Tensor>(a(x)));
    x = torch::relu(nb.forward<Tensor>(b(x)));
    return head(x.mean({2, 3}));
  }
};

template <typename Wrapped>
void train(Net& net, Wrapped& wrapped, const Tensor& x, const Tensor& target) {
  torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    sgd.zero_grad();
    torch::mse_loss(wrapped.forward(x), target).backward();
    sgd.step();
  }
}

// Small buckets, so that they leave between the layers' backward collectives.
TEST(SyncBatchNorm, AConvolutionalNetTrainsAsInOneProcess) {
  torch::manual_seed(1);
  const Tensor x = torch::randn({8, 2, 7, 7}, torch::kDouble), target = torch::randn({8, 3}, torch::kDouble);
  Net one(torch::nn::BatchNorm2d(4), torch::nn::BatchNorm2d(4));
  std::vector<Tensor> start;
  for (const auto& p : one.parameters()) start.push_back(p.detach().clone());
  train(one, one, x, target);
  for (int world : {2, 4}) {
    std::vector<std::string> digests(static_cast<std::size_t>(world));
    on_ranks(world, [&](auto group) {
      const auto options = torch::nn::BatchNormOptions(4);
      auto net = std::make_shared<Net>(SyncBatchNorm(options, group), SyncBatchNorm(options, group));
      for (std::size_t i = 0; i < start.size(); ++i) net->parameters()[i].detach().copy_(start[i]);
      DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 0});
      const std::int64_t n = 8 / group->size(), first = n * group->rank();
      train(*net, ddp, x.slice(0, first, first + n), target.slice(0, first, first + n));
      // f64; five steps amplify roundings of 1e-16.
      const auto ours = net->named_parameters(), theirs = one.named_parameters();
      for (const auto& p : ours) EXPECT_TRUE(torch::allclose(p.value(), theirs[p.key()], 1e-10, 1e-12)) << p.key();
      for (const auto& b : net->named_buffers())
        EXPECT_TRUE(torch::allclose(b.value(), one.named_buffers()[b.key()], 1e-10, 1e-12)) << b.key();
      EXPECT_TRUE(ddp.replicas_identical());
    });
  }
}

}  // namespace
}  // namespace unisono
