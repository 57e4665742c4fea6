// Sparse gradients: gathered, not reduced in a bucket.
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

torch::nn::Embedding embedding(int rows = 6, int width = 1, int padding = -1) {
  auto options = torch::nn::EmbeddingOptions(rows, width).sparse(true);
  if (padding >= 0) options.padding_idx(padding);
  torch::nn::Embedding e(options);
  at::NoGradGuard no_grad;
  e->weight.fill_(1);
  return e;
}

Tensor ids(std::vector<std::int64_t> values) { return torch::tensor(values); }

std::vector<double> dense(const Tensor& grad) {
  EXPECT_EQ(grad.layout(), at::kSparse);
  EXPECT_TRUE(grad.is_coalesced());
  const Tensor d = grad.to_dense().to(at::kDouble).contiguous();
  return {d.data_ptr<double>(), d.data_ptr<double>() + d.numel()};
}

// E6: other rows on every rank, some twice.
TEST(Sparse, RowsOfAllRanks) {
  on_ranks(2, [](auto group) {
    auto e = embedding();
    DistributedDataParallel ddp(e, group);
    for (int step = 0; step < 3; ++step) {
      e->zero_grad();
      ddp(group->rank() == 0 ? ids({1, 2}) : ids({2, 5, 5})).sum().backward();
      EXPECT_EQ(dense(e->weight.grad()), (std::vector<double>{0, 0.5, 1, 0, 0, 1}));
    }
  });
}

// E6: only the padding row on one rank: an empty gradient; unused on one rank, then on all.
TEST(Sparse, NothingOnOneRankOrOnAll) {
  on_ranks(2, [](auto group) {
    auto e = embedding(6, 1, 0);
    torch::nn::Linear head(torch::nn::LinearOptions(1, 1).bias(false));
    torch::nn::Sequential model(e, head);
    DistributedDataParallel ddp(model, group);
    ddp(group->rank() == 0 ? ids({0}) : ids({3})).sum().backward();
    EXPECT_EQ(dense(e->weight.grad())[3] * 2, head->weight[0][0].template item<double>());
    model->zero_grad();
    if (group->rank() == 0) {
      head(torch::ones({1, 1})).sum().backward();
    } else {
      ddp(ids({4, 4})).sum().backward();
    }
    EXPECT_EQ(dense(e->weight.grad())[4], head->weight[0][0].template item<double>());
    model->zero_grad();
    head(torch::ones({1, 1})).sum().backward();
    EXPECT_FALSE(e->weight.grad().defined());
  });
}

TEST(Sparse, AccumulatesAndIsWeighted) {
  on_ranks(2, [](auto group) {
    auto e = embedding();
    DistributedDataParallel ddp(e, group);
    {
      auto skip = ddp.no_sync();
      ddp(ids({0, 1})).sum().backward();
    }
    ddp(ids({1})).sum().backward();
    EXPECT_EQ(dense(e->weight.grad()), (std::vector<double>{1, 2, 0, 0, 0, 0}));
    // Without zero_grad a weighted step leaves what was there alone and adds its own average: five rows of 0, one of 1.
    const int n = group->rank() == 0 ? 5 : 1;
    ddp.weight(ddp(group->rank() == 0 ? ids({0, 0, 0, 0, 0}) : ids({1})).mean(), n).backward();
    const auto grad = dense(e->weight.grad());
    EXPECT_NEAR(grad[0], 1 + 5.0 / 6, 1e-6);  // f32
    EXPECT_NEAR(grad[1], 2 + 1.0 / 6, 1e-6);
    e->zero_grad();
    ddp.weight(ddp(ids({0})).mean(), 0).backward();
    EXPECT_EQ(dense(e->weight.grad()), std::vector<double>(6, 0.0));
  });
}

// One optimizer step equals one process's on the union batch; the same bits on all ranks, four ranks with other counts.
TEST(Sparse, TrainsAsOneProcess) {
  on_ranks(4, [](auto group) {
    auto ours = embedding(20, 3), alone = embedding(20, 3);
    DistributedDataParallel ddp(ours, group);
    torch::optim::SGD optimizer(ours->parameters(), 0.5), reference(alone->parameters(), 0.5);
    for (int step = 0; step < 4; ++step) {
      std::vector<Tensor> all;
      for (int r = 0; r < 4; ++r) {
        auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step * 10 + r));
        all.push_back(torch::randint(20, {1 + 2 * r}, generator, torch::kLong));
      }
      optimizer.zero_grad();
      ddp(all[static_cast<std::size_t>(group->rank())]).pow(2).sum().backward();
      optimizer.step();
      reference.zero_grad();
      (alone(torch::cat(all)).pow(2).sum() / 4).backward();
      reference.step();
      // Rows are summed in another order than in one process: a few units in the last place of values near 1.
      EXPECT_TRUE(torch::allclose(ours->weight, alone->weight, 0, 1e-6));
      EXPECT_TRUE(ddp.replicas_identical());
    }
  });
}

// A gradient that turns out dense on one rank is summed dense on all; one that turns out sparse without notice is made
// dense.
TEST(Sparse, LayoutsMayDiffer) {
  on_ranks(2, [](auto group) {
    auto e = embedding();
    DistributedDataParallel ddp(e, group);
    if (group->rank() == 0) {
      ddp(ids({1})).sum().backward();
    } else {
      (e->weight * 2).sum().backward();
    }
    const Tensor grad = e->weight.grad();
    EXPECT_EQ(grad.layout(), at::kStrided);
    EXPECT_EQ(grad[1][0].template item<float>(), 1.5);
    EXPECT_EQ(grad[0][0].template item<float>(), 1);
  });
  on_ranks(2, [](auto group) {
    struct Own : torch::nn::Module {
      Tensor weight = register_parameter("weight", torch::ones({6, 1}));
      Tensor forward(const Tensor& i) { return torch::embedding(weight, i, -1, false, /*sparse=*/true); }
    };
    for (bool named : {false, true}) {
      auto m = std::make_shared<Own>();
      DistributedDataParallelOptions options;
      if (named) options.sparse_parameters = {"weight"};
      DistributedDataParallel ddp(m, group, options);
      ddp(group->rank() == 0 ? ids({1}) : ids({5})).sum().backward();
      EXPECT_EQ(m->weight.grad().layout(), named ? at::kSparse : at::kStrided);
      EXPECT_EQ(m->weight.grad().to_dense()[5][0].template item<float>(), 0.5);
    }
  });
}

}  // namespace
}  // namespace unisono
