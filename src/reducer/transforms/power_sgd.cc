#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <unisono/transforms.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "reducer/transforms/error_memory.h"

namespace unisono {
namespace {

// One gradient M (n x m) of the bucket and its factors P (n x r), Q (m x r); all P of a bucket lie in one tensor, all Q
// in another.
struct Factored {
  std::string name;
  at::Tensor gradient;
  at::Tensor matrix;
  at::Tensor p, q;
};

class PowerSGD final : public GradientTransform {
 public:
  explicit PowerSGD(const PowerSGDOptions& options) : options_(options) {
    if (options.rank < 1 || options.start_step < 0 || !(options.min_compression > 0)) {
      throw Error(ErrorCode::invalid_argument,
                  "power_sgd: rank is " + std::to_string(options.rank) + ", start_step " +
                      std::to_string(options.start_step) + ", min_compression " +
                      std::to_string(options.min_compression) +
                      "; rank must be at least 1, start_step at least 0, min_compression above 0");
    }
  }
  std::string name() const override { return "power_sgd"; }
  int rounds() const override { return 2; }

  TransformTask run(GradientBucket bucket, GradientChannel& channel) override {
    if (bucket.step < options_.start_step || bucket.buffer.numel() == 0) {
      co_await channel.all_reduce(bucket.buffer, ReduceOp::avg);
      co_return;
    }
    std::vector<at::Tensor> whole;
    std::vector<Factored> factored = split(bucket, whole);
    at::Tensor left = pack(whole, bucket.buffer);
    Work first = channel.all_reduce(left, ReduceOp::avg);
    at::Tensor ps = flat_of(factored, &Factored::p, bucket.buffer);
    co_await channel.all_reduce(ps, ReduceOp::avg);
    first.wait();
    unpack(left, whole);
    unpack_factors(ps, factored, &Factored::p);
    for (Factored& f : factored) {
      f.p = std::get<0>(at::linalg_qr(f.p));
      f.q = at::matmul(f.matrix.t(), f.p);
    }
    at::Tensor qs = flat_of(factored, &Factored::q, bucket.buffer);
    co_await channel.all_reduce(qs, ReduceOp::avg);
    unpack_factors(qs, factored, &Factored::q);
    // The same on all ranks. A step that overflowed must not stay in memory; its gradient arrives as it is.
    const bool finite = at::isfinite(ps).all().item<bool>() && at::isfinite(qs).all().item<bool>();
    for (Factored& f : factored) {
      at::Tensor approximated = at::matmul(f.p, f.q.t());
      if (!finite) approximated.fill_(std::numeric_limits<double>::quiet_NaN());
      f.gradient.copy_(approximated.reshape(f.gradient.sizes()));
      if (!finite) continue;
      if (options_.error_feedback) memory_.remember(f.name, (f.matrix - approximated).reshape(f.gradient.sizes()));
      if (options_.warm_start) right_[f.name] = f.q.clone();
    }
  }

  std::vector<NamedTensor> state() const override {
    std::vector<NamedTensor> out;
    for (const auto& [name, error] : memory_.all()) out.push_back({"error." + name, error});
    for (const auto& [name, q] : right_) out.push_back({"right." + name, q});
    return out;
  }
  void load_state(const std::vector<NamedTensor>& state) override {
    ErrorMemory memory;
    std::map<std::string, at::Tensor> right;
    for (const NamedTensor& entry : state) {
      if (entry.name.rfind("error.", 0) == 0) {
        memory.remember(entry.name.substr(6), entry.tensor.clone());
      } else if (entry.name.rfind("right.", 0) == 0) {
        right[entry.name.substr(6)] = entry.tensor.clone();
      } else {
        throw Error(ErrorCode::invalid_argument,
                    "'" + entry.name + "' is no state of the gradient transform 'power_sgd'");
      }
    }
    memory_ = std::move(memory);
    right_ = std::move(right);
  }

 private:
  std::vector<Factored> split(const GradientBucket& bucket, std::vector<at::Tensor>& whole) const {
    std::vector<Factored> factored;
    for (const NamedTensor& g : bucket.gradients) {
      const double n = g.tensor.dim() > 0 ? static_cast<double>(g.tensor.size(0)) : 0;
      const double elements = static_cast<double>(g.tensor.numel());
      const bool shrinks = g.tensor.dim() >= 2 && elements > 0 && !g.tensor.is_complex() &&
                           g.tensor.element_size() >= 4 &&
                           elements >= options_.min_compression * (n + elements / n) * options_.rank;
      if (!shrinks) {
        whole.push_back(g.tensor);
        continue;
      }
      if (options_.error_feedback) memory_.add_to(g);
      Factored f{g.name, g.tensor, g.tensor.reshape({g.tensor.size(0), -1}).clone(), {}, right_factor(g)};
      f.p = at::matmul(f.matrix, f.q);
      factored.push_back(std::move(f));
    }
    return factored;
  }

  at::Tensor right_factor(const NamedTensor& g) const {
    const std::int64_t rows = g.tensor.size(0), columns = g.tensor.numel() / rows;
    const auto found = right_.find(g.name);  // of another shape: of another parameter that had the name
    const std::vector<std::int64_t> shape{columns, std::min<std::int64_t>(rows, options_.rank)};
    if (options_.warm_start && found != right_.end() && found->second.sizes() == shape) return found->second;
    const std::uint64_t key = std::hash<std::string>{}(g.name) ^ options_.seed;
    at::Generator generator = at::detail::createCPUGenerator(key);
    return at::randn({columns, options_.rank}, generator, g.tensor.options().device(at::kCPU)).to(g.tensor.device());
  }

  static at::Tensor pack(const std::vector<at::Tensor>& tensors, const at::Tensor& like) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& t : tensors) flat.push_back((t.is_complex() ? at::view_as_real(t) : t).reshape({-1}));
    return flat.empty() ? at::empty({0}, like.options()) : at::cat(flat);
  }
  static void unpack(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
    std::int64_t at = 0;
    for (const at::Tensor& t : tensors) {
      at::Tensor real = t.is_complex() ? at::view_as_real(t) : t;
      real.copy_(flat.narrow(0, at, real.numel()).view(real.sizes()));
      at += real.numel();
    }
  }
  static at::Tensor flat_of(const std::vector<Factored>& all, at::Tensor Factored::* part, const at::Tensor& like) {
    std::vector<at::Tensor> parts;
    for (const Factored& f : all) parts.push_back(f.*part);
    return pack(parts, like);
  }
  static void unpack_factors(const at::Tensor& flat, std::vector<Factored>& all, at::Tensor Factored::* part) {
    std::int64_t at = 0;
    for (Factored& f : all) {
      at::Tensor& t = f.*part;
      t = flat.narrow(0, at, t.numel()).view(t.sizes());
      at += t.numel();
    }
  }

  PowerSGDOptions options_;
  ErrorMemory memory_;
  std::map<std::string, at::Tensor> right_;
};

}  // namespace

std::shared_ptr<GradientTransform> power_sgd_transform(const PowerSGDOptions& options) {
  return std::make_shared<PowerSGD>(options);
}

}  // namespace unisono
