#include <ATen/ATen.h>
#include <unisono/transforms.h>

#include "reducer/transforms/error_memory.h"

namespace unisono {
namespace {

class Int8 final : public GradientTransform {
 public:
  explicit Int8(bool error_feedback) : error_feedback_(error_feedback) {}
  std::string name() const override { return "int8"; }
  int rounds() const override { return 2; }

  TransformTask run(GradientBucket bucket, GradientChannel& channel) override {
    if (error_feedback_) {
      for (const NamedTensor& g : bucket.gradients) memory_.add_to(g);
    }
    at::Tensor largest = bucket.buffer.numel() > 0 ? bucket.buffer.abs().max().to(at::kFloat).reshape({1})
                                                   : at::zeros({1}, bucket.buffer.options().dtype(at::kFloat));
    co_await channel.all_reduce(largest, ReduceOp::max);
    const double scale = largest.item<double>() / 127;
    if (!std::isfinite(scale)) {  // infinities and NaN must arrive as such
      bucket.buffer.fill_(std::numeric_limits<double>::quiet_NaN());
      co_return;
    }
    if (scale == 0) {
      bucket.buffer.zero_();
      co_return;
    }
    at::Tensor bytes = (bucket.buffer / scale).round_().clamp_(-127, 127).to(at::kChar);
    if (error_feedback_) {
      bucket.buffer.sub_(bytes.to(bucket.buffer.scalar_type()).mul_(scale));
      for (const NamedTensor& g : bucket.gradients) memory_.remember(g.name, g.tensor.clone());
    }
    at::Tensor all = at::empty({channel.size(), bytes.numel()}, bytes.options());
    co_await channel.all_gather(all, bytes);
    bucket.buffer.copy_(all.sum(0, false, at::kInt)).mul_(scale / channel.size());
  }

  std::vector<NamedTensor> state() const override {
    std::vector<NamedTensor> out;
    for (const auto& [name, error] : memory_.all()) out.push_back({"error." + name, error});
    return out;
  }
  void load_state(const std::vector<NamedTensor>& state) override {
    ErrorMemory memory;
    for (const NamedTensor& entry : state) {
      if (entry.name.rfind("error.", 0) != 0) {
        throw Error(ErrorCode::invalid_argument, "'" + entry.name + "' is no state of the gradient transform 'int8'");
      }
      memory.remember(entry.name.substr(6), entry.tensor.clone());
    }
    memory_ = std::move(memory);
  }

 private:
  bool error_feedback_;
  ErrorMemory memory_;
};

}  // namespace

std::shared_ptr<GradientTransform> int8_transform(bool error_feedback) {
  return std::make_shared<Int8>(error_feedback);
}

}  // namespace unisono
