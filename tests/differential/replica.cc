#include "differential/replica.h"

#include "differential/record.h"

namespace unisono::differential {

using at::Tensor;

Replica::Replica(const Case& c, std::size_t rank_)
    : rank(rank_),
      model(std::make_shared<RandomModel>(c.model, c.seed)),  // every rank starts from rank 0's values
      parameters(model->parameters()),
      sgd(parameters, torch::optim::SGDOptions(0.1).momentum(c.momentum ? 0.9 : 0)),
      fires(size()),
      produced(size()),
      opened(size()),
      aside(size()),
      magnitude(size()),
      silent_for(size()) {
  for (std::size_t i = 0; i < size(); ++i) {
    if (!parameters[i].requires_grad()) continue;
    parameters[i].register_hook([this, i](const Tensor& gradient) { return on_gradient(i, gradient); });
  }
}

Tensor Replica::on_gradient(std::size_t index, const Tensor& gradient) {
  if (!listening_ || !gradient.defined()) return gradient;
  ++fires[index];
  produced[index] = true;
  const Tensor used = void_ ? at::zeros_like(gradient) : gradient;
  if (used.numel() > 0) magnitude[index] += used.detach().abs().max().to(at::kDouble).item<double>();
  if (weighted && !opened[index]) {
    opened[index] = true;
    aside[index] = copy_of(parameters[index].grad());
    parameters[index].mutable_grad().reset();
  }
  return used;
}

Tensor Replica::loss(const Micro& micro, const Call& call) { return model->forward(call)[micro.side ? 1 : 0]; }

void Replica::backward(const Micro& micro, const Tensor& loss, bool retain) {
  fires.assign(size(), 0);
  Tensor scaled = loss;
  if (!micro.weights.empty()) {
    const double n = micro.weights[rank];
    weighted = true;
    weight += n;
    void_ = n == 0;
    scaled = loss * n;
  }
  listening_ = true;
  scaled.backward({}, retain);
  listening_ = void_ = false;
}

void Replica::close_window() {
  produced.assign(size(), false);
  opened.assign(size(), false);
  aside.assign(size(), {});
  magnitude.assign(size(), 0);
  weight = 0;
  weighted = false;
}

}  // namespace unisono::differential
