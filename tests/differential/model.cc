#include "differential/model.h"

#include <stdexcept>

namespace unisono::differential {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static Tensor forward(AutogradContext*, const Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list) { throw std::runtime_error(kOwnError); }
};

RandomModel* model_in(AutogradContext* context) {
  return reinterpret_cast<RandomModel*>(context->saved_data["model"].toInt());
}

struct Undefined : torch::autograd::Function<Undefined> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor&, std::int64_t model) {
    context->saved_data["model"] = model;
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    model_in(context)->reached_undefined = true;
    return {gradients[0], Tensor(), Tensor()};
  }
};

// Runs its node without recording, and again, with a backward of its own, when the gradient comes.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static Tensor forward(AutogradContext* context, const Tensor& x, std::int64_t model, std::int64_t node) {
    context->save_for_backward({x});
    context->saved_data["model"] = model;
    context->saved_data["node"] = node;
    at::NoGradGuard no_grad;
    return model_in(context)->run(static_cast<std::size_t>(node), x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    at::AutoGradMode enable(true);
    Tensor y = model_in(context)->run(static_cast<std::size_t>(context->saved_data["node"].toInt()), x);
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), Tensor(), Tensor()};
  }
};

}  // namespace

void fill(Tensor& tensor, Draw& draw, double scale) {
  at::NoGradGuard no_grad;
  Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  Tensor flat = at::empty({real.numel()}, at::kFloat);
  float* data = flat.data_ptr<float>();
  for (std::int64_t i = 0; i < flat.numel(); ++i) data[i] = static_cast<float>(draw.real() * scale);
  real.copy_(flat.view(real.sizes()));
}

RandomModel::RandomModel(const ModelSpec& spec, std::uint64_t seed)
    : spec_(spec), values_(seed), own_(spec.nodes.size()) {
  const int w = spec.width;
  const auto factor = [&](std::size_t i, at::ScalarType type) { add(i, "factor", at::empty({w}, type)); };
  for (std::size_t i = 0; i < spec_.nodes.size(); ++i) {
    switch (spec_.nodes[i].layer) {
      case Layer::linear:
        add(i, "weight", at::empty({w, w}));
        if (spec_.nodes[i].flag) add(i, "bias", at::empty({w}));
        break;
      case Layer::branch:
        add(i, "left", at::empty({w, w}));
        add(i, "right", at::empty({w, w}));
        break;
      case Layer::checkpoint:
      case Layer::unused:
        add(i, "weight", at::empty({w, w}));
        break;
      case Layer::transposed:
        add(i, "weight", at::empty({w, w}).t());
        break;
      case Layer::channels_last:
        add(i, "kernel", at::empty({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
        break;
      case Layer::scalar:
        add(i, "scale", at::empty({}));
        break;
      case Layer::empty:
        add(i, "nothing", at::empty({0, 4}));
        break;
      case Layer::f64:
        factor(i, at::kDouble);
        break;
      case Layer::bf16:
        factor(i, at::kBFloat16);
        break;
      case Layer::f16:
        factor(i, at::kHalf);
        break;
      case Layer::complex:
        factor(i, at::kComplexFloat);
        break;
      case Layer::undefined:
        factor(i, at::kFloat);
        break;
      case Layer::frozen:
        add(i, "factor", at::empty({w}), false);
        break;
      case Layer::shared:
      case Layer::recheckpoint:
        break;
    }
  }
}

Tensor& RandomModel::add(std::size_t node, const char* name, Tensor value, bool requires_grad) {
  fill(value, values_, 0.9);
  own_[node].push_back(register_parameter("node" + std::to_string(node) + "_" + name, value, requires_grad));
  return own_[node].back();
}

Tensor RandomModel::run(std::size_t node, const Tensor& hidden) {
  const Node& n = spec_.nodes[node];
  const auto& own = n.of < 0 ? own_[node] : own_[static_cast<std::size_t>(n.of)];
  return at::tanh(at::linear(hidden, own[0], n.of < 0 && own.size() > 1 ? own[1] : Tensor()));
}

Tensor RandomModel::apply(std::size_t node, const Tensor& hidden, const Call& call) {
  const Node& n = spec_.nodes[node];
  const auto& own = own_[node];
  switch (n.layer) {
    case Layer::linear:
    case Layer::shared:
    case Layer::transposed:
      return run(node, hidden);
    case Layer::checkpoint:
    case Layer::recheckpoint:
      if (call.plain) return run(node, hidden);
      return Reentrant::apply(hidden, reinterpret_cast<std::int64_t>(this), static_cast<std::int64_t>(node));
    case Layer::branch:
      return at::tanh(at::linear(hidden, own[call.mask >> n.gate & 1]));
    case Layer::empty:
      return hidden + own[0].sum();
    case Layer::complex: {
      // The gradient arrives as a lazy conjugate when the parameter is the one conjugated.
      const Tensor product = n.flag ? hidden * own[0].conj() : hidden * own[0];
      return at::real(product) + 0.5 * at::imag(product);
    }
    case Layer::channels_last:
      return hidden * (own[0] * at::arange(24, at::kFloat).view({2, 3, 2, 2})).mean();
    case Layer::undefined:
      return Undefined::apply(hidden, own[0], reinterpret_cast<std::int64_t>(this));
    case Layer::unused:
      return hidden;
    case Layer::scalar:
    case Layer::f64:
    case Layer::bf16:
    case Layer::f16:
    case Layer::frozen:
      return (hidden.to(own[0].scalar_type()) * own[0]).to(at::kFloat);
  }
  throw std::logic_error("a layer without a forward");
}

std::vector<Tensor> RandomModel::forward(const Call& call) {
  Draw draw(call.data);
  Tensor hidden = at::empty({2, spec_.width});
  fill(hidden, draw, 1);
  if (call.nan) hidden.fill_(NAN);
  if (spec_.reentrant()) hidden.requires_grad_();
  Tensor side;
  for (std::size_t i = 0; i < spec_.nodes.size(); ++i) {
    const Node& n = spec_.nodes[i];
    if (n.gate < 0 || n.layer == Layer::branch || (call.mask >> n.gate & 1)) hidden = apply(i, hidden, call);
    if (call.throw_in_forward == static_cast<int>(i)) throw std::runtime_error(kOwnError);
    if (call.throw_in_backward == static_cast<int>(i)) hidden = ThrowInBackward::apply(hidden);
    if (spec_.exit == static_cast<int>(i)) side = hidden;
  }
  return {hidden.square().mean() + hidden.mean(), side.mean()};
}

bool reaches_a_parameter(const ModelSpec& spec, const Call& call, bool side, const std::vector<bool>& frozen) {
  RandomModel model(spec, 1);
  auto parameters = model.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (frozen[i]) parameters[i].set_requires_grad(false);
  }
  try {
    model.forward(call)[side ? 1 : 0].backward();
  } catch (const std::exception&) {
  }
  bool reached = model.reached_undefined;
  for (const Tensor& p : parameters) reached |= p.grad().defined();
  return reached;
}

}  // namespace unisono::differential
