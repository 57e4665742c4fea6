// A libtorch program that fits a noisy sine with a small network, made data-parallel: lines marked (*) were added.

#include <torch/torch.h>
#include <unisono/unisono.h>  // (*)

#include <cstdio>
#include <exception>

struct NetImpl : torch::nn::Module {
  NetImpl()
      : hidden(register_module("hidden", torch::nn::Linear(1, 32))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})))),
        out(register_module("out", torch::nn::Linear(32, 1))) {}

  torch::Tensor forward(torch::Tensor x) { return out(torch::tanh(norm(hidden(x)))); }

  torch::nn::Linear hidden;
  torch::nn::LayerNorm norm;
  torch::nn::Linear out;
};
TORCH_MODULE(Net);

struct Batch {
  torch::Tensor x, y;
};

Batch draw(int size) {
  auto x = torch::rand({size, 1}) * 6 - 3;
  return {x, torch::sin(x) + 0.05 * torch::randn({size, 1})};
}

int train() {
  auto group = unisono::init();  // (*)
  torch::manual_seed(
      group->rank());  // (*) another seed on each rank: other data, and another model until it is wrapped
  Net net;
  unisono::DistributedDataParallel model(net, group);  // (*)
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));

  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const Batch batch = draw(64);
    auto loss = torch::mse_loss(model(batch.x), batch.y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }

  const bool same = model.replicas_identical();  // (*)
  std::printf("loss %.4f -> %.4f, replicas identical: %s, digest %s\n", first, last, same ? "yes" : "NO",
              model.digest().c_str());
  return same && last < 0.1 * first ? 0 : 1;
}

int main() {
  try {
    return train();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
