#include <ATen/ATen.h>
#include <unisono/transforms.h>

namespace unisono {
namespace {

class PostLocalSGD final : public GradientTransform {
 public:
  PostLocalSGD(std::int64_t start_step, std::shared_ptr<ProcessGroup> local)
      : start_step_(start_step), local_(std::move(local)) {}
  std::string name() const override { return "post_local_sgd"; }
  bool keeps_replicas_equal() const override { return false; }

  TransformTask run(GradientBucket bucket, GradientChannel& channel) override {
    if (bucket.step < start_step_) {
      co_await channel.all_reduce(bucket.buffer, ReduceOp::avg);
      co_return;
    }
    if (!local_ || local_->size() == 1) co_return;
    GradientChannel near(*local_, {bucket.step, bucket.index, "local gradients"});
    co_await near.all_reduce(bucket.buffer, ReduceOp::avg);
  }

 private:
  std::int64_t start_step_;
  std::shared_ptr<ProcessGroup> local_;
};

}  // namespace

std::shared_ptr<GradientTransform> post_local_sgd_transform(std::int64_t start_step,
                                                            std::shared_ptr<ProcessGroup> local) {
  if (start_step < 0) {
    throw Error(ErrorCode::invalid_argument,
                "post_local_sgd: start_step is " + std::to_string(start_step) + ", below 0");
  }
  return std::make_shared<PostLocalSGD>(start_step, std::move(local));
}

}  // namespace unisono
