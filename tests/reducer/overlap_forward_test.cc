// Optimizer steps that are left to the next forward.
#include "comm/fake/fake_group.h"
#include "ranks.h"

namespace unisono {
namespace {

using namespace unisono::testing;
using torch::Tensor;

torch::nn::Sequential net() {
  torch::nn::Sequential n(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 7), torch::nn::Tanh(),
                          torch::nn::Linear(7, 4));
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

// The same bits as an optimizer that steps after backward: whatever the buckets and views, with accumulation, weights,
// an evaluation between steps, parameters read between steps, two forwards before two backwards.
TEST(OverlapForward, SameBitsAsAfterwards) {
  for (bool views : {true, false}) {
    for (double cap : {0.0, 25.0}) {
      for (int kind = 0; kind < 5; ++kind) {
        on_ranks(2, [&](auto group) {
          auto late = net(), after = net();
          DistributedDataParallelOptions options{.bucket_cap_mb = cap, .gradient_as_bucket_view = views};
          DistributedDataParallel a(late, group, options), b(after, group, options);
          torch::optim::SGD optimizer(after->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
          a.step_in_backward(sgd, {.overlap_forward = true});
          const int r = group->rank();
          for (int step = 0; step < 5; ++step) {
            optimizer.zero_grad();
            for (auto* ddp : {&a, &b}) {
              if (kind == 1) {
                auto skip = ddp->no_sync();
                ddp->weight((*ddp)(inputs(r, step + 50)).pow(2).mean(), 3).backward();
                ddp->core().set_sync(true);
                ddp->weight((*ddp)(inputs(r, step)).pow(2).mean(), 2 + r).backward();
              } else if (kind == 2) {
                Tensor one = (*ddp)(inputs(r, step)).pow(2).mean(), two = (*ddp)(inputs(r, step + 50)).sum();
                (one + two).backward();
              } else {
                (*ddp)(inputs(r, step)).pow(2).mean().backward();
              }
            }
            optimizer.step();
            if (kind == 3) {
              torch::NoGradGuard no_grad;
              ASSERT_TRUE(same_bits(late->forward(inputs(0, 77)), after->forward(inputs(0, 77)))) << step;
            }
            if (kind == 4) ASSERT_TRUE(same_bits(late->parameters()[2].detach() * 1, after->parameters()[2])) << step;
            EXPECT_FALSE(late->parameters()[0].grad().defined());
          }
          ASSERT_EQ(a.digest(), b.digest()) << views << cap << kind;
          EXPECT_TRUE(a.replicas_identical());
        });
      }
    }
  }
}

// Two ranks of a scripted world, whose bucket of the last layer does not arrive: backward returns all the same, the
// forward goes through the first layers, and waits at the last one.
TEST(OverlapForward, TheForwardWaitsLayerByLayer) {
  FakeWorld world(2);
  std::vector<std::vector<std::string>> order(2);
  std::vector<std::string> failures(2);
  std::atomic<int> in_last_layer{0}, returned{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      try {
        auto model = net();
        DistributedDataParallel ddp(
            model, world.group(r),
            {.bucket_cap_mb = 0, .broadcast_buffers = false, .init_sync = false, .check_replicas = false});
        auto& log = order[static_cast<std::size_t>(r)];
        ddp.core().set_step_in_backward(
            [&](const std::vector<NamedTensor>& parameters) {
              for (const auto& p : parameters) {
                log.push_back("step " + p.name);
                p.tensor.mutable_grad().reset();
              }
            },
            {.overlap_forward = true});
        for (int step : {0, 1}) {  // the second rebuilds the buckets
          ddp(inputs(r, step)).pow(2).mean().backward();
          ddp.finish_step();
        }
        log.clear();
        Tensor loss = ddp(inputs(r, 2)).pow(2).mean();
        const auto made = static_cast<std::int64_t>(world.calls(r).size());
        ++in_last_layer;
        while (in_last_layer < 2) std::this_thread::yield();
        if (r == 0) world.hold();
        ++in_last_layer;
        while (in_last_layer < 4) std::this_thread::yield();
        loss.backward();
        log.push_back("backward returned");
        ++returned;
        while (returned < 2) std::this_thread::yield();
        // One message for each of six parameters, the last layer's first.
        const auto calls = world.calls(r);
        std::vector<std::int64_t> buckets;
        for (std::size_t i = static_cast<std::size_t>(made); i < calls.size(); ++i) {
          if (calls[i].what == "gradients") buckets.push_back(calls[i].sequence);
        }
        ASSERT_EQ(buckets.size(), 6u);
        if (r == 0) {
          for (std::size_t b = 2; b < 6; ++b) world.release(buckets[b]);
        }
        Tensor x = inputs(r, 3);
        for (std::size_t layer = 0; layer < 4; ++layer) {
          x = layer % 2 ? torch::tanh(x) : model->ptr<torch::nn::LinearImpl>(layer)->forward(x);
          log.push_back("layer " + std::to_string(layer));
        }
        ++returned;
        while (returned < 4) std::this_thread::yield();
        if (r == 0) world.release_all();
        x = model->ptr<torch::nn::LinearImpl>(4)->forward(x);
        log.push_back("layer 4");
        ddp.finish_step();
      } catch (const std::exception& e) {
        failures[static_cast<std::size_t>(r)] = e.what();
        world.release_all();
        in_last_layer = returned = 100;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const std::vector<std::string> expected{"backward returned", "step 0.weight", "step 0.bias", "layer 0",
                                          "layer 1",           "step 2.weight", "step 2.bias", "layer 2",
                                          "layer 3",           "step 4.weight", "step 4.bias", "layer 4"};
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(failures[r], "");
    EXPECT_EQ(order[r], expected);
  }
}

// What goes wrong in a step taken inside a forward cannot be thrown there: the wrapper's forward throws it at its end,
// and the next backward would.
TEST(OverlapForward, ErrorsReachTheCaller) {
  for (bool through_wrapper : {true, false}) {
    const auto failures = failures_of(2, [&](auto group) {
      auto model = net();
      DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
      int steps = 0;
      ddp.core().set_step_in_backward(
          [&](const std::vector<NamedTensor>& parameters) {
            for (const auto& p : parameters) p.tensor.mutable_grad().reset();
            if (++steps == 6) throw std::runtime_error("the optimizer has had enough");
          },
          {.overlap_forward = true});
      ddp(inputs(group->rank(), 0)).sum().backward();
      if (through_wrapper) {
        ddp(inputs(0, 1));
      } else {
        model->forward(inputs(0, 1)).sum().backward();
      }
      ADD_FAILURE() << "nothing was thrown";
    });
    for (const auto& failure : failures) EXPECT_NE(failure.find("had enough"), std::string::npos) << failure;
  }
}

// A rank that throws in its backward: the others learn of it where the rest of that step is taken.
TEST(OverlapForward, AnAbandonedBackwardIsNamed) {
  const auto failures = failures_of(2, [&](auto group) {
    auto model = net();
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0});
    ddp.step_in_backward(sgd, {.overlap_forward = true});
    ddp(inputs(group->rank(), 0)).sum().backward();
    if (group->rank() == 1) {
      auto hook = model->parameters()[0].register_hook([](const Tensor& g) -> Tensor {
        throw std::runtime_error("no more");
        return g;
      });
      EXPECT_THROW(ddp(inputs(1, 1)).sum().backward(), std::exception);
      model->parameters()[0].remove_hook(hook);
    } else {
      ddp(inputs(0, 1)).sum().backward();
      try {
        ddp(inputs(0, 2));
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("rank 1 threw in its backward of step 1"), std::string::npos) << e.what();
      }
    }
    // The step is repeated, on both.
    ddp(inputs(group->rank(), 3)).sum().backward();
    EXPECT_TRUE(ddp.replicas_identical());
  });
  for (const auto& failure : failures) EXPECT_EQ(failure, "");
}

// Parameters of no rank are not touched; a wrapper that is destroyed takes the steps that are left.
TEST(OverlapForward, NothingIsLost) {
  on_ranks(2, [](auto group) {
    auto model = net(), after = net();
    {
      DistributedDataParallel ddp(model, group), other(after, group);
      torch::optim::SGD optimizer(after->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      ddp.step_in_backward(sgd, {.overlap_forward = true});
      ddp(inputs(group->rank(), 0)).sum().backward();
      other(inputs(group->rank(), 0)).sum().backward();
      optimizer.step();
    }
    for (std::size_t i = 0; i < 6; ++i) EXPECT_TRUE(same_bits(model->parameters()[i], after->parameters()[i])) << i;
  });
}

TEST(OverlapForward, RefusedWhereItCannotBeRight) {
  on_ranks(2, [](auto group) {
    auto model = net();
    DistributedDataParallel ddp(model, group);
    EXPECT_THROW(ddp.step_in_backward(sgd, {.max_norm = 1, .overlap_forward = true}), Error);
    ddp.core().set_transform(bf16_transform());
    EXPECT_THROW(ddp.step_in_backward(sgd, {.overlap_forward = true}), Error);
    ddp.core().set_transform(nullptr);
    ddp.step_in_backward(sgd, {.overlap_forward = true});
    EXPECT_THROW(ddp.core().set_transform(bf16_transform()), Error);
  });
}

}  // namespace
}  // namespace unisono
