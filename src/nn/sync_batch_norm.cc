#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/batchnorm.h>
#include <unisono/companion.h>
#include <unisono/sync_batch_norm.h>

#include <cmath>
#include <sstream>

#include "nn/channel_statistics.h"

namespace unisono {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::string here(const ProcessGroup& group) {
  return "SyncBatchNorm, group " + group.name() + ", rank " + std::to_string(group.rank()) + ": ";
}

// What backward needs beside tensors; autograd carries it as an opaque object.
struct Backward final : torch::CustomClassHolder {
  std::shared_ptr<ProcessGroup> group;
  std::function<void(const Error&)> rethrow;
  double count = 0;

  template <typename F>
  auto guarded(const F& body) const {
    try {
      return body();
    } catch (const Error& error) {
      if (rethrow) rethrow(error);
      throw;
    }
  }
};

// Stands behind the gradients when they are themselves recorded: refuses to be differentiated rather than be wrong.
struct NoSecondDerivative : torch::autograd::Function<NoSecondDerivative> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& incoming, const at::Tensor& input,
                               const variable_list& gradients, const c10::intrusive_ptr<Backward>& shared) {
    ctx->saved_data["shared"] = c10::IValue::make_capsule(shared);
    variable_list out;
    for (const at::Tensor& g : gradients) out.push_back(g.clone());
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list&) {
    const auto shared = c10::static_intrusive_pointer_cast<Backward>(ctx->saved_data["shared"].toCapsule());
    return shared->guarded([&]() -> variable_list {
      throw Error(ErrorCode::invalid_argument,
                  here(*shared->group) + "it has no second derivative; use BatchNorm there");
    });
  }
};

void refuse_second_derivative(variable_list& gradients, const at::Tensor& incoming, const at::Tensor& input,
                              const c10::intrusive_ptr<Backward>& shared) {
  variable_list defined;
  for (const at::Tensor& g : gradients) {
    if (g.defined()) defined.push_back(g);
  }
  const variable_list recorded = NoSecondDerivative::apply(incoming, input, defined, shared);
  auto next = recorded.begin();
  for (at::Tensor& g : gradients) {
    if (g.defined()) g = *next++;
  }
}

at::Tensor to_tensor(const std::vector<double>& values, at::ScalarType dtype) {
  return at::tensor(values, at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

struct Normalise : torch::autograd::Function<Normalise> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& invstd,
                            const c10::intrusive_ptr<Backward>& shared) {
    const at::Tensor scale = weight ? weight->detach().to(mean.scalar_type()) : at::ones_like(mean);
    ctx->save_for_backward({input, scale, mean, invstd});
    ctx->saved_data["shared"] = c10::IValue::make_capsule(shared);
    ctx->saved_data["weight_dtype"] = static_cast<std::int64_t>(weight ? weight->scalar_type() : mean.scalar_type());
    ctx->saved_data["bias_dtype"] = static_cast<std::int64_t>(bias ? bias->scalar_type() : mean.scalar_type());
    ctx->saved_data["affine"] = c10::List<bool>({weight.has_value(), bias.has_value()});
    if (input.numel() == 0) return at::empty_like(input);
    // Torch's own kernel for known statistics, told that the variance is 1: it rounds as torch's training forward does.
    const at::Tensor offset = bias ? bias->detach().to(mean.scalar_type()) : at::zeros_like(mean);
    return std::get<0>(
        at::native_batch_norm(input, scale * invstd, offset, mean, at::ones_like(mean), false, 0.0, 0.0));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto shared = c10::static_intrusive_pointer_cast<Backward>(ctx->saved_data["shared"].toCapsule());
    const auto saved = ctx->get_saved_variables();
    variable_list out;
    {
      at::NoGradGuard no_grad;
      out = shared->guarded([&] { return gradients_of(ctx, *shared, saved, gradients[0]); });
    }
    if (at::GradMode::is_enabled()) refuse_second_derivative(out, gradients[0], saved[0], shared);
    out.resize(6);
    return out;
  }

 private:
  static variable_list gradients_of(AutogradContext* ctx, const Backward& shared, const variable_list& saved,
                                    const at::Tensor& incoming) {
    const auto& [input, scale, mean, invstd] = std::tie(saved[0], saved[1], saved[2], saved[3]);
    const at::Tensor gradient = incoming.to(input.scalar_type()).contiguous(input.suggest_memory_format());
    auto [sum, product] = gradient_sums(gradient, input, mean);
    const auto dtype = mean.scalar_type();
    variable_list out(3);
    const auto affine = ctx->saved_data["affine"].toBoolList();
    if (affine[0]) {
      out[1] = to_tensor(product, dtype)
                   .mul_(invstd)
                   .to(static_cast<at::ScalarType>(ctx->saved_data["weight_dtype"].toInt()));
    }
    if (affine[1]) out[2] = to_tensor(sum, static_cast<at::ScalarType>(ctx->saved_data["bias_dtype"].toInt()));
    if (!ctx->needs_input_grad(0)) return out;
    std::vector<double> sums = sum;
    sums.insert(sums.end(), product.begin(), product.end());
    AllReduceOptions options;
    options.tag.what = "SyncBatchNorm backward";
    shared.group->all_reduce({sums.data(), sums.size(), Dtype::f64}, options).wait();
    const at::Tensor all = to_tensor(sums, at::kDouble).div_(shared.count);
    const std::int64_t channels = mean.numel();
    const at::Tensor shift = all.narrow(0, 0, channels).to(dtype).contiguous();
    const at::Tensor slope = (all.narrow(0, channels, channels) * invstd * invstd).to(dtype);
    out[0] = input_gradient(gradient, input, mean, shift, slope, invstd, scale.contiguous());
    return out;
  }
};

void check(const at::Tensor& input, const at::Tensor& parameter, const ProcessGroup& group, const char* name) {
  if (!parameter.defined() || (parameter.dim() == 1 && parameter.size(0) == input.size(1))) return;
  std::ostringstream text;
  text << here(group) << name << " has shape " << parameter.sizes() << " and the input " << input.sizes() << ": "
       << input.size(1) << " channels";
  throw Error(ErrorCode::invalid_argument, text.str());
}

void check(const at::Tensor& input, const ProcessGroup& group) {
  std::ostringstream text;
  if (input.dim() < 2) {
    text << "the input has shape " << input.sizes() << "; it may be (N, C) or (N, C, ...)";
  } else if (!input.is_cpu() || input.layout() != at::kStrided) {
    text << "the input is no dense tensor on the CPU but on " << input.device()
         << "; on GPUs use torch's SyncBatchNorm";
  } else if (!at::isFloatingType(input.scalar_type())) {
    text << "the input has dtype " << input.scalar_type() << "; it may be float, double, half or bfloat16";
  } else {
    return;
  }
  throw Error(ErrorCode::invalid_argument, here(group) + text.str());
}

ChannelStatistics gather(const at::Tensor& input, ProcessGroup& group) {
  const std::int64_t channels = input.size(1);
  const std::size_t words = ChannelStatistics::words(channels);
  std::vector<double> mine = statistics_of(input).pack();
  const auto world = static_cast<std::size_t>(group.size());
  std::vector<double> all(words * world);
  CallOptions options;
  options.tag.what = "SyncBatchNorm forward";
  group.all_gather({all.data(), all.size(), Dtype::f64}, {mine.data(), words, Dtype::f64}, options).wait();
  std::vector<ChannelStatistics> parts;
  for (std::size_t r = 0; r < world; ++r) parts.push_back(ChannelStatistics::unpack(all.data() + r * words, channels));
  return combined(std::move(parts));
}

void update_running(const at::Tensor& running, const at::Tensor& now, double momentum) {
  if (!running.defined()) return;
  running.copy_(now.to(at::kDouble) * momentum + running.to(at::kDouble) * (1 - momentum));
}

}  // namespace

at::Tensor sync_batch_norm(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                           const at::Tensor& running_mean, const at::Tensor& running_var,
                           const std::shared_ptr<ProcessGroup>& group, const SyncBatchNormSettings& settings) {
  check(input, *group);
  check(input, weight, *group, "weight");
  check(input, bias, *group, "bias");
  check(input, running_mean, *group, "running_mean");
  check(input, running_var, *group, "running_var");
  const at::Tensor dense = input.contiguous(input.suggest_memory_format());
  auto shared = c10::make_intrusive<Backward>();
  shared->group = companion(group);
  shared->rethrow = settings.rethrow;
  at::Tensor mean;
  at::Tensor invstd;
  {
    at::NoGradGuard no_grad;
    const ChannelStatistics all = gather(dense.detach(), *shared->group);
    if (all.count <= 1) {
      throw Error(ErrorCode::invalid_argument, here(*group) + "all ranks together have " +
                                                   std::to_string(static_cast<std::int64_t>(all.count)) +
                                                   " values per channel; a variance needs more than one");
    }
    // Rounded where torch's BatchNorm rounds, so that its bits are met.
    const auto dtype = dense.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    mean = to_tensor(all.sum, at::kDouble).div_(all.count).to(dtype);
    const at::Tensor squares = to_tensor(all.squares, dtype);
    invstd = (squares / all.count).to(at::kDouble).add_(settings.eps).sqrt_().reciprocal_().to(dtype);
    update_running(running_mean, mean, settings.momentum);
    update_running(running_var, squares.to(at::kDouble) / (all.count - 1), settings.momentum);
    shared->count = all.count;
  }
  const auto given = [](const at::Tensor& t) { return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt; };
  return Normalise::apply(dense, given(weight), given(bias), mean, invstd, shared);
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, std::shared_ptr<ProcessGroup> group)
    : NormImplBase(options) {
  set_group(std::move(group));
}

void SyncBatchNormImpl::set_group(std::shared_ptr<ProcessGroup> group) {
  if (!group) throw Error(ErrorCode::invalid_argument, "SyncBatchNorm needs a process group; see unisono::init()");
  group_ = std::move(group);
}

void SyncBatchNormImpl::_check_input_dim(const torch::Tensor& input) { check(input, *group_); }

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& input) {
  const bool updates = is_training() && options.track_running_stats();
  double momentum = options.momentum().value_or(0.0);
  if (updates) {
    num_batches_tracked += 1;
    if (!options.momentum()) momentum = 1.0 / num_batches_tracked.item<double>();
  }
  if (is_training() && group_->size() > 1) {
    const at::Tensor none;
    return sync_batch_norm(input, weight, bias, updates ? running_mean : none, updates ? running_var : none, group_,
                           {.eps = options.eps(), .momentum = momentum});
  }
  return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                   is_training() || !running_mean.defined(), momentum, options.eps());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "unisono::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats() << ")";
}

}  // namespace unisono
