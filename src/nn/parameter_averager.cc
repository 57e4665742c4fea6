#include <ATen/ATen.h>
#include <unisono/parameter_averager.h>

#include <numeric>

#include "comm/c10d/tensors.h"
#include "reducer/bucket_plan.h"
#include "reducer/torch_types.h"

namespace unisono {

ParameterAverager::ParameterAverager(std::vector<NamedTensor> parameters, std::shared_ptr<ProcessGroup> group,
                                     std::int64_t period, std::int64_t warmup)
    : group_(std::move(group)), period_(period), warmup_(warmup) {
  if (period < 1 || warmup < 0) {
    throw Error(ErrorCode::invalid_argument, "ParameterAverager: period is " + std::to_string(period) + ", warmup " +
                                                 std::to_string(warmup) + "; at least 1 and 0 are needed");
  }
  follow(std::move(parameters));
}

void ParameterAverager::follow(std::vector<NamedTensor> parameters) {
  for (const NamedTensor& p : parameters) {
    if (!p.tensor.is_floating_point() && !p.tensor.is_complex()) {
      throw Error(ErrorCode::invalid_argument, "ParameterAverager: parameter '" + p.name + "' has dtype " +
                                                   at::toString(p.tensor.scalar_type()) + ", which has no mean");
    }
  }
  parameters_ = std::move(parameters);
}

bool ParameterAverager::step() {
  ++steps_;
  if (steps_ < warmup_ || steps_ % period_ != 0) return false;
  average();
  return true;
}

void ParameterAverager::average() {
  if (group_->size() == 1) return;
  at::NoGradGuard no_grad;
  std::vector<GradientSpec> specs;
  for (const NamedTensor& p : parameters_) {
    specs.push_back(
        {p.tensor.nbytes(), wire_type(p.tensor.scalar_type(), "parameter '" + p.name + "'").dtype, place_of(p.tensor)});
  }
  std::vector<std::size_t> order(parameters_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  constexpr std::size_t cap = 25 * 1024 * 1024;
  AllReduceOptions options;
  options.op = ReduceOp::avg;
  options.tag.what = "parameters";
  for (const BucketSpec& bucket : plan_buckets(specs, order, {cap, cap})) {
    std::vector<at::Tensor> flat;
    for (std::size_t i : bucket.members)
      flat.push_back(real_view(parameters_[i].tensor.detach().resolve_conj().resolve_neg().contiguous()).flatten());
    at::Tensor packed = at::cat(flat);
    group_->all_reduce(buffer_of(packed, "parameters"), options).wait();
    std::int64_t at = 0;
    for (std::size_t m = 0; m < bucket.members.size(); ++m) {
      at::Tensor target = parameters_[bucket.members[m]].tensor.detach();
      const std::int64_t n = flat[m].numel();
      at::Tensor mean = packed.narrow(0, at, n);
      if (target.is_complex()) mean = at::view_as_complex(mean.clone().view({-1, 2}));
      target.copy_(mean.view(target.sizes()));
      at += n;
    }
  }
}

}  // namespace unisono
