// A small character-level GPT, trained data-parallel on the plays of Shakespeare.
//
//   unisono run -n 2 build/examples/gpt            1,500 steps, about two minutes on 2 cores
//   unisono run -n 2 build/examples/gpt --quick    a few seconds
//   build/examples/gpt                             the same with one worker
//
// Read from top to bottom: data, model, one step, training, the table. What data parallelism adds is marked (1) to (5).

#include <torch/torch.h>
#include <unisono/unisono.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>

#include "common/adamw.h"
#include "common/flags.h"
#include "common/progress.h"
#include "common/run_directory.h"

namespace {

constexpr int kLayers = 4, kWidth = 128, kHeads = 4, kContext = 64;

struct Settings {
  int steps, batch, seed, threads;
  double lr, bucket_cap_mb;
  bool quick;
  std::string name, out, data;
};

Settings settings_of(int argc, char** argv) {
  example::Flags flags(argc, argv);
  Settings s;
  s.quick = flags.on("quick", "a run of a few seconds, for tests");
  s.steps = flags.integer("steps", s.quick ? 30 : 1500, 1, "optimizer steps");
  s.batch = flags.integer("batch", s.quick ? 4 : 12, 1, "sequences per rank and step");
  s.seed = flags.integer("seed", 1, 0, "of the model's start and the batches");
  s.threads = flags.integer("threads", 0, 0, "per rank; 0: what the launcher says");
  s.lr = flags.number("lr", 3e-3, "highest learning rate");
  s.bucket_cap_mb = flags.number("bucket-cap-mb", -1, "gradient buckets in MiB; -1: the library's choice");
  s.name = flags.text("name", "gpt", "of the run");
  s.out = flags.text("out", "runs", "where runs are written");
  s.data = flags.text("data", "data/shakespeare.txt", "the text, from tools/fetch_data.py");
  flags.done();
  return s;
}

// ---------------------------------------------------------------------------------------------------------- data

struct Text {
  at::Tensor train, validation;  // the first 90% and the last 10%, one byte per character
  int vocabulary = 0;
};

Text load_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path + "; fetch it with: python tools/fetch_data.py");
  const std::string raw{std::istreambuf_iterator<char>(file), {}};
  std::array<std::uint8_t, 256> index{};
  for (const char c : raw) index[static_cast<std::uint8_t>(c)] = 1;
  int vocabulary = 0;
  for (auto& i : index)
    if (i != 0) i = static_cast<std::uint8_t>(vocabulary++);
  const auto n = static_cast<std::int64_t>(raw.size());
  if (n < 20 * (kContext + 1)) throw std::runtime_error(path + " is too short to train on");
  at::Tensor ids = at::empty({n}, at::kByte);
  std::transform(raw.begin(), raw.end(), ids.data_ptr<std::uint8_t>(),
                 [&](char c) { return index[static_cast<std::uint8_t>(c)]; });
  const std::int64_t cut = n * 9 / 10;
  return {ids.narrow(0, 0, cut), ids.narrow(0, cut, n - cut), vocabulary};
}

struct Batch {
  at::Tensor inputs, targets;
};

/// The sequences that begin at `offsets`; the target of each character is the next one.
Batch sequences_at(const at::Tensor& text, const at::Tensor& offsets) {
  const at::Tensor windows = text.index({offsets.view({-1, 1}) + at::arange(kContext + 1)}).to(at::kLong);
  return {windows.narrow(1, 0, kContext).contiguous(), windows.narrow(1, 1, kContext).contiguous()};
}

Batch random_batch(const at::Tensor& text, int batch, at::Generator& random) {
  return sequences_at(text, at::randint(0, text.size(0) - kContext, {batch}, random, at::kLong));
}

// --------------------------------------------------------------------------------------------------------- model

/// In one pass; calling the module would add the bias of three-dimensional inputs in a second one.
at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};

  BlockImpl() {
    ln1 = register_module("ln1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    proj = register_module("proj", torch::nn::Linear(kWidth, kWidth));
    ln2 = register_module("ln2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }

  at::Tensor forward(at::Tensor x) {
    const auto batch = x.size(0), time = x.size(1);
    const auto heads =
        linear(qkv, ln1(x)).view({batch, time, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto attended = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, /*is_causal=*/true);
    x = x + linear(proj, attended.transpose(1, 2).reshape({batch, time, kWidth}));
    return x + linear(down, at::gelu(linear(up, ln2(x)), "tanh"));
  }
};
TORCH_MODULE(Block);

struct GPTImpl : torch::nn::Module {
  torch::nn::Embedding token{nullptr}, position{nullptr};
  torch::nn::Sequential blocks{nullptr};
  torch::nn::LayerNorm ln{nullptr};

  GPTImpl(int vocabulary, int seed) {
    token = register_module("token", torch::nn::Embedding(vocabulary, kWidth));
    position = register_module("position", torch::nn::Embedding(kContext, kWidth));
    blocks = register_module("blocks", torch::nn::Sequential());
    for (int i = 0; i < kLayers; ++i) blocks->push_back(Block());
    ln = register_module("ln", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    start_values(seed);
  }

  /// GPT-2's: normal with deviation 0.02, less where a block writes into the residual stream.
  void start_values(int seed) {
    torch::NoGradGuard no_grad;
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    for (auto& p : named_parameters()) {
      const std::string& name = p.key();
      if (p.value().dim() < 2) {
        if (name.ends_with("bias")) p.value().zero_();
        continue;
      }
      const bool residual = name.ends_with("proj.weight") || name.ends_with("down.weight");
      p.value().normal_(0, residual ? 0.02 / std::sqrt(2.0 * kLayers) : 0.02);
    }
  }

  at::Tensor forward(const at::Tensor& ids) {
    const auto x = ln(blocks->forward(token(ids) + position->weight));
    return at::linear(x, token->weight);  // one matrix for reading and for writing characters
  }
};
TORCH_MODULE(GPT);

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.view({-1, logits.size(-1)}), targets.view(-1));
}

/// Rises over the first steps, then falls along half a cosine to a tenth.
double learning_rate(const Settings& s, int step) {
  const int warmup = std::min(100, s.steps / 10 + 1);
  const double fall = 0.1 + 0.45 * (1 + std::cos(M_PI * step / s.steps));
  return s.lr * std::min(1.0, (step + 1.0) / warmup) * fall;
}

/// Mean loss over sequences spread evenly over `text`, shared out over ranks.
double evaluate(GPT& model, const at::Tensor& text, int sequences, unisono::ProcessGroup& group) {
  torch::NoGradGuard no_grad;
  const auto mine = at::arange(group.rank(), sequences, group.size());
  const auto spread = at::floor_divide(mine * (text.size(0) - kContext - 1), sequences);
  double sum[2] = {0, 0};  // of losses, of sequences
  for (const auto& offsets : spread.split(64)) {
    const Batch batch = sequences_at(text, offsets);
    const auto n = static_cast<double>(offsets.size(0));
    sum[0] += n * loss_of(model(batch.inputs), batch.targets).item<double>();
    sum[1] += n;
  }
  group.all_reduce({sum, 2, unisono::Dtype::f64}).wait();  // (5) other numbers cross ranks through the group itself
  return sum[0] / sum[1];
}

// ------------------------------------------------------------------------------------------------------ measuring

struct Throughput {
  double alone = 0, together = 0;  // tokens/s of rank 0 with the others asleep; of all ranks in data parallel
};

/// In turns, so that both see the same machine; on a model of its own, so that training is not touched.
Throughput measure(const Settings& s, const Text& text, const std::shared_ptr<unisono::ProcessGroup>& group) {
  auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(group->rank()));
  const int rounds = s.quick ? 1 : 4, steps = s.quick ? 3 : 20;
  const auto timed = [&](auto& model, example::AdamW& optimizer, std::vector<double>& times) {
    for (int i = 0; i < steps; ++i) {
      const double begin = example::seconds_now();
      const Batch batch = random_batch(text.train, s.batch, random);
      const auto loss = loss_of(model.forward(batch.inputs), batch.targets);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step(1e-4);
      if (i > 0) times.push_back(example::seconds_now() - begin);
    }
  };
  GPT plain(text.vocabulary, s.seed), shared(text.vocabulary, s.seed);
  unisono::DistributedDataParallel ddp(shared, group);
  example::AdamW plain_optimizer(plain->parameters(), {}), shared_optimizer(shared->parameters(), {});
  std::vector<double> alone, together;
  for (int round = 0; round < rounds; ++round) {
    if (group->rank() == 0) timed(*plain, plain_optimizer, alone);
    group->barrier().wait();  // the others sleep here
    timed(ddp, shared_optimizer, together);
    group->barrier().wait();
  }
  const double tokens = s.batch * kContext;
  return {tokens / example::median(alone), tokens * group->size() / example::median(together)};
}

// ------------------------------------------------------------------------------------------------------- training

int train(int argc, char** argv) {
  const Settings s = settings_of(argc, argv);
  if (s.threads > 0) at::set_num_threads(s.threads);

  const auto group = unisono::init();  // (1) who am I, who are the others
  const int rank = group->rank(), world = group->size();
  example::Progress progress(rank == 0);
  example::RunDirectory run(s.out, s.name, group);
  const Text text = load_text(s.data);
  progress.say(example::format("%s characters, %d different; %s, %s each, over %s",
                               example::with_commas(text.train.size(0) + text.validation.size(0)).c_str(),
                               text.vocabulary, example::count(world, "rank").c_str(),
                               example::count(at::get_num_threads(), "thread").c_str(), group->name().c_str()));
  const Throughput throughput = measure(s, text, group);

  GPT model(text.vocabulary, s.seed);
  unisono::DistributedDataParallelOptions options;
  if (s.bucket_cap_mb >= 0) options.bucket_cap_mb = s.bucket_cap_mb;
  unisono::DistributedDataParallel ddp(model, group, options);  // (2) rank 0's values for all, hooks on every parameter
  example::AdamW optimizer(model->parameters(), {});
  auto random = at::make_generator<at::CPUGeneratorImpl>(  // (3) each rank draws its own batches
      static_cast<std::uint64_t>(s.seed) * 1000 + static_cast<std::uint64_t>(rank));
  run.write(example::Json()
                .add("kind", "start")
                .add("steps", s.steps)
                .add("ranks", world)
                .add("batch", s.batch)
                .add("seed", s.seed)
                .add("threads", at::get_num_threads())
                .add("parameters", [&] {
                  double count = 0;
                  for (const auto& p : model->parameters()) count += static_cast<double>(p.numel());
                  return count;
                }()));

  const int evaluate_every = s.quick ? 10 : 250, sequences = s.quick ? 64 : 1024;
  const int trace_from = s.steps / 2, trace_to = std::min(s.steps, trace_from + 5);
  const double tokens = static_cast<double>(s.batch) * kContext * world;
  std::vector<double> step_s, exposed_s;
  double validation = 0;
  const double begin = example::seconds_now();
  for (int step = 0; step < s.steps; ++step) {
    if (step == trace_from) ddp.core().set_tracing(true);
    const double step_begin = example::seconds_now();
    const Batch batch = random_batch(text.train, s.batch, random);
    const auto loss = loss_of(ddp(batch.inputs), batch.targets);
    optimizer.zero_grad();
    loss.backward();  // (4) gradients are averaged over ranks while this runs
    optimizer.step(learning_rate(s, step));
    const auto loss_here = loss.item<double>();
    const double now = example::seconds_now();
    step_s.push_back(now - step_begin);
    exposed_s.push_back(ddp.last_step().exposed_s);
    if (step + 1 == trace_to) {
      run.write_trace(ddp.core().take_trace());
      ddp.core().set_tracing(false);
    }
    if (!std::isfinite(loss_here)) throw std::runtime_error("the loss is not finite in step " + std::to_string(step));

    run.write(example::Json()
                  .add("kind", "step")
                  .add("step", step)
                  .add("loss", loss_here)
                  .add("step_ms", step_s.back() * 1e3)
                  .add("exposed_ms", exposed_s.back() * 1e3)
                  .add("tokens_per_s", tokens / step_s.back())
                  .add("lr", learning_rate(s, step)));
    const std::vector<double> recent(step_s.end() - std::min<std::ptrdiff_t>(20, std::ssize(step_s)), step_s.end());
    progress.show(example::format("step %d/%d loss %.3f, %s tokens/s, exposed %.2f ms (%.1f%%), %s left", step + 1,
                                  s.steps, loss_here, example::with_commas(tokens / example::median(recent)).c_str(),
                                  exposed_s.back() * 1e3, 100 * exposed_s.back() / step_s.back(),
                                  progress.minutes((now - begin) / (step + 1) * (s.steps - step - 1)).c_str()));
    if ((step + 1) % evaluate_every == 0 || step + 1 == s.steps) {
      validation = evaluate(model, text.validation, sequences, *group);
      progress.say(example::format("step %d: validation loss %.4f", step + 1, validation));
      run.write(example::Json().add("kind", "validation").add("step", step).add("loss", validation));
    }
  }
  const double seconds = example::seconds_now() - begin;

  const bool identical = ddp.replicas_identical();
  const auto digests = example::gather_digests(*group, ddp.digest());
  const double exposed = example::median(exposed_s), whole = example::median(step_s);
  const double efficiency = throughput.together / (world * throughput.alone);
  run.write(example::Json()
                .add("kind", "summary")
                .add("validation_loss", validation)
                .add("seconds", seconds)
                .add("tokens_per_s_1_rank", throughput.alone)
                .add("tokens_per_s_all_ranks", throughput.together)
                .add("weak_scaling_efficiency", efficiency)
                .add("exposed_ms", exposed * 1e3)
                .add("step_ms", whole * 1e3)
                .add("replicas_identical", identical ? "yes" : "no")
                .add("digests", digests));
  if (rank != 0) return identical ? 0 : 1;
  example::Table table;
  table.row("validation loss", example::format("%.4f after %d steps", validation, s.steps));
  table.row("training time", example::format("%.1f s", seconds));
  const std::string threads = "  (" + example::count(at::get_num_threads(), "thread") + " per rank)";
  table.row("tokens/s, 1 rank alone", example::with_commas(throughput.alone) + threads);
  table.row("tokens/s, " + example::count(world, "rank"), example::with_commas(throughput.together) + threads);
  table.row("weak-scaling efficiency", example::format("%.1f%%", 100 * efficiency));
  table.row("exposed communication", example::format("%.2f ms of %.1f ms per step (%.1f%%), median", exposed * 1e3,
                                                     whole * 1e3, 100 * exposed / whole));
  table.row("replicas identical", identical ? "yes" : "NO");
  table.row("digest", digests[0]);
  table.row("written to", run.path().string());
  table.print();
  return identical ? 0 : 1;
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
