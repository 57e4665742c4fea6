// A small convolutional net on 4,000 real handwritten digits, held to account on another 1,000.
//
//   unisono run -n 2 build/examples/mnist            a few seconds on 2 cores
//
// Shows how to share out a data set exactly: every digit is seen once an epoch whatever the number of ranks, none
// twice, none left out, and the gradient is the mean over the samples, not over the ranks (the last batch is uneven).

#include <torch/torch.h>
#include <unisono/unisono.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>

#include "common/adamw.h"
#include "common/flags.h"
#include "common/progress.h"
#include "common/run_directory.h"

namespace {

constexpr int kDigits = 5000, kTrain = 4000, kPixels = 28 * 28;

struct Digits {
  at::Tensor train_x, train_y, test_x, test_y;
};

Digits load_digits(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string raw{std::istreambuf_iterator<char>(file), {}};
  if (raw.size() != kDigits * (kPixels + 1))
    throw std::runtime_error(path + " is missing or not whole; fetch it with: python tools/fetch_data.py");
  const at::Tensor bytes = at::from_blob(raw.data(), {kDigits * (kPixels + 1)}, at::kByte);
  const at::Tensor x = bytes.narrow(0, 0, kDigits * kPixels).view({kDigits, 1, 28, 28}).to(at::kFloat) / 255 - 0.13;
  const at::Tensor y = bytes.narrow(0, kDigits * kPixels, kDigits).to(at::kLong);
  auto fixed = at::make_generator<at::CPUGeneratorImpl>(2026);
  const at::Tensor order = at::randperm(kDigits, fixed, at::kLong);  // the file is sorted by label
  const at::Tensor train = order.narrow(0, 0, kTrain), test = order.narrow(0, kTrain, kDigits - kTrain);
  return {x.index({train}), y.index({train}), x.index({test}), y.index({test})};
}

struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};

  NetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3)));
    conv2 = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3)));
    fc1 = register_module("fc1", torch::nn::Linear(32 * 5 * 5, 128));
    fc2 = register_module("fc2", torch::nn::Linear(128, 10));
  }
  at::Tensor forward(at::Tensor x) {
    x = at::max_pool2d(at::relu(conv1(x)), 2);
    x = at::max_pool2d(at::relu(conv2(x)), 2);
    return fc2(at::relu(fc1(x.flatten(1))));
  }
};
TORCH_MODULE(Net);

/// This rank's part of `items`: neighbouring pieces, as even as can be.
at::Tensor share(const at::Tensor& items, int rank, int world) {
  const auto n = items.size(0), begin = n * rank / world, end = n * (rank + 1) / world;
  return items.narrow(0, begin, end - begin);
}

double accuracy(Net& net, const Digits& digits, unisono::ProcessGroup& group) {
  torch::NoGradGuard no_grad;
  const at::Tensor mine = share(at::arange(digits.test_y.size(0)), group.rank(), group.size());
  const at::Tensor right = net(digits.test_x.index({mine})).argmax(1).eq(digits.test_y.index({mine})).sum();
  double sum[2] = {right.item<double>(), static_cast<double>(mine.size(0))};
  group.all_reduce({sum, 2, unisono::Dtype::f64}).wait();
  return sum[0] / sum[1];
}

int train(int argc, char** argv) {
  example::Flags flags(argc, argv);
  const bool quick = flags.on("quick", "one epoch, for tests");
  const int epochs = flags.integer("epochs", quick ? 1 : 8, 1, "passes over the 4,000 digits");
  const int batch = flags.integer("batch", 32, 1, "digits per rank and step");
  const int seed = flags.integer("seed", 1, 0, "of the model's start and the order of the digits");
  const int threads = flags.integer("threads", 0, 0, "per rank; 0: what the launcher says");
  const double lr = flags.number("lr", 2e-3, "highest learning rate");
  const double cap = flags.number("bucket-cap-mb", -1, "gradient buckets in MiB; -1: the library's choice");
  const std::string name = flags.text("name", "mnist", "of the run"), out = flags.text("out", "runs", "where to write");
  const std::string data = flags.text("data", "data/mnist.bin", "the digits, from tools/fetch_data.py");
  flags.done();
  if (threads > 0) at::set_num_threads(threads);

  const auto group = unisono::init();
  const int rank = group->rank(), world = group->size();
  example::Progress progress(rank == 0);
  example::RunDirectory run(out, name, group);
  const Digits digits = load_digits(data);

  torch::manual_seed(static_cast<std::uint64_t>(seed));
  Net net;
  unisono::DistributedDataParallelOptions options;
  if (cap >= 0) options.bucket_cap_mb = cap;
  unisono::DistributedDataParallel ddp(net, group, options);
  example::AdamW optimizer(net->parameters(), {.beta2 = 0.999, .weight_decay = 0.01});
  run.write(example::Json()
                .add("kind", "start")
                .add("epochs", epochs)
                .add("ranks", world)
                .add("batch", batch)
                .add("seed", seed)
                .add("threads", at::get_num_threads()));

  const int whole_batch = batch * world, steps = epochs * ((kTrain + whole_batch - 1) / whole_batch);
  const int trace_from = 3, trace_to = std::min(8, steps);
  at::Tensor seen = at::zeros({kTrain}, at::kInt);  // how often this rank saw each digit
  std::vector<double> step_s, exposed_s;
  double held_out = 0;
  int step = 0;
  const double begin = example::seconds_now();
  for (int epoch = 0; epoch < epochs; ++epoch) {
    auto shuffle = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed * 1000 + epoch));
    const at::Tensor order = at::randperm(kTrain, shuffle, at::kLong);  // the same on every rank
    for (const auto& together : order.split(whole_batch)) {
      if (step == trace_from) ddp.core().set_tracing(true);
      const double step_begin = example::seconds_now();
      const at::Tensor mine = share(together, rank, world);
      const auto n = static_cast<double>(mine.size(0));  // may be 0 in the last batch
      const at::Tensor logits = ddp(digits.train_x.index({mine}));
      const auto sum =
          torch::nn::functional::cross_entropy(logits, digits.train_y.index({mine}),
                                               torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      const auto loss = sum / std::max(n, 1.0);
      optimizer.zero_grad();
      ddp.weight(loss, n).backward();  // gradients of the mean over all samples of all ranks
      optimizer.step(lr * (0.05 + 0.475 * (1 + std::cos(M_PI * step / steps))));
      seen.index_add_(0, mine, at::ones({mine.size(0)}, at::kInt));
      const auto loss_here = loss.item<double>();
      step_s.push_back(example::seconds_now() - step_begin);
      exposed_s.push_back(ddp.last_step().exposed_s);
      if (++step == trace_to) {
        run.write_trace(ddp.core().take_trace());
        ddp.core().set_tracing(false);
      }
      run.write(example::Json()
                    .add("kind", "step")
                    .add("step", step - 1)
                    .add("loss", loss_here)
                    .add("step_ms", step_s.back() * 1e3)
                    .add("exposed_ms", exposed_s.back() * 1e3));
      progress.show(example::format("epoch %d/%d, step %d/%d, loss %.3f, exposed %.2f ms (%.1f%%)", epoch + 1, epochs,
                                    step, steps, loss_here, exposed_s.back() * 1e3,
                                    100 * exposed_s.back() / step_s.back()));
    }
    held_out = accuracy(net, digits, *group);
    progress.say(example::format("epoch %d: held-out accuracy %.2f%%", epoch + 1, 100 * held_out));
    run.write(example::Json().add("kind", "validation").add("step", step - 1).add("accuracy", held_out));
  }
  const double seconds = example::seconds_now() - begin;

  group->all_reduce({seen.data_ptr(), kTrain, unisono::Dtype::i32}).wait();
  const bool exact = seen.eq(epochs).all().item<bool>();
  const bool identical = ddp.replicas_identical();
  const auto digests = example::gather_digests(*group, ddp.digest());
  const double exposed = example::median(exposed_s), whole = example::median(step_s);
  run.write(example::Json()
                .add("kind", "summary")
                .add("accuracy", held_out)
                .add("seconds", seconds)
                .add("exact_coverage", exact ? "yes" : "no")
                .add("exposed_ms", exposed * 1e3)
                .add("step_ms", whole * 1e3)
                .add("replicas_identical", identical ? "yes" : "no")
                .add("digests", digests));
  if (rank == 0) {
    example::Table table;
    table.row("held-out accuracy", example::format("%.2f%% of 1,000 digits after %s", 100 * held_out,
                                                   example::count(epochs, "epoch").c_str()));
    table.row("training time", example::format("%.1f s, %s", seconds, example::count(world, "rank").c_str()));
    table.row("each digit once an epoch", exact ? "yes" : "NO");
    table.row("exposed communication", example::format("%.2f ms of %.1f ms per step (%.1f%%), median", exposed * 1e3,
                                                       whole * 1e3, 100 * exposed / whole));
    table.row("replicas identical", identical ? "yes" : "NO");
    table.row("digest", digests[0]);
    table.row("written to", run.path().string());
    table.print();
  }
  return identical && exact ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return train(argc, argv);
  } catch (const std::exception& error) {
    const char* rank = std::getenv("RANK");
    std::fprintf(stderr, "rank %s: %s\n", rank ? rank : "0", error.what());
    return 1;
  }
}
