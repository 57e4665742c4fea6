#include <ATen/ATen.h>
#include <unisono/transforms.h>

namespace unisono {
namespace {

class Half final : public GradientTransform {
 public:
  Half(std::string name, at::ScalarType type) : name_(std::move(name)), type_(type) {}
  std::string name() const override { return name_; }

  TransformTask run(GradientBucket bucket, GradientChannel& channel) override {
    if (bucket.buffer.element_size() <= 2) {  // as narrow already
      co_await channel.all_reduce(bucket.buffer, ReduceOp::avg);
      co_return;
    }
    at::Tensor narrow = (bucket.buffer / channel.size()).to(type_);
    co_await channel.all_reduce(narrow);
    bucket.buffer.copy_(narrow);
  }

 private:
  std::string name_;
  at::ScalarType type_;
};

}  // namespace

std::shared_ptr<GradientTransform> f16_transform() { return std::make_shared<Half>("f16", at::kHalf); }
std::shared_ptr<GradientTransform> bf16_transform() { return std::make_shared<Half>("bf16", at::kBFloat16); }

}  // namespace unisono
