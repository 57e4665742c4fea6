// The least that data-parallel training needs. Everything that is not plain libtorch is marked.
//
//   unisono run -n 2 build/examples/minimal

#include <torch/torch.h>
#include <unisono/unisono.h>  // <- 1

#include <cstdio>

namespace F = torch::nn::functional;

// Any module will do; forward may take and return anything.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear hidden{nullptr}, out{nullptr};
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(1, 64));
    out = register_module("out", torch::nn::Linear(64, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return out(at::tanh(hidden(x))); }
};
TORCH_MODULE(Net);

int main() try {
  auto group = unisono::init();           // <- 2: from the launcher; a world of one without any
  torch::manual_seed(1 + group->rank());  // <- 3: each rank draws its own data

  Net net;
  unisono::DistributedDataParallel ddp(net, group);  // <- 4: all start as rank 0
  torch::optim::Adam optimizer(net->parameters(), 0.01);

  for (int step = 0; step < 500; ++step) {
    const auto x = at::rand({32, 1}) * 6 - 3;
    const auto loss = F::mse_loss(ddp(x), at::sin(x));  // <- 5: ddp(x), not net(x)
    optimizer.zero_grad();
    loss.backward();  // gradients are averaged over ranks while this runs
    optimizer.step();
    if (step % 100 == 99 && group->rank() == 0) std::printf("step %d  loss %.5f\n", step + 1, loss.item<double>());
  }

  const bool identical = ddp.replicas_identical();
  if (group->rank() == 0) std::printf("replicas identical: %s\n%s\n", identical ? "yes" : "NO", ddp.digest().c_str());
  return identical ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
