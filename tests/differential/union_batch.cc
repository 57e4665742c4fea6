// The second opinion: one worker, one loss over everything that the window's micro-batches hold, one backward.
#include <algorithm>

#include "differential/average.h"
#include "differential/record.h"
#include "differential/reference.h"

namespace unisono::differential {

using at::Tensor;

void Reference::compare_with_union(double total_weight) {
  Replica& worker = replicas_[0];
  Tensor loss = at::zeros({});
  for (const Contribution& c : contributions_) {
    const bool weighted = !c.micro.weights.empty();
    if (weighted && c.factor == 0) continue;
    Call call = c.micro.calls[c.rank];
    call.plain = true;  // no backward inside the backward
    loss = loss + worker.loss(c.micro, call) * (weighted ? c.factor / total_weight : 1.0 / case_.world);
  }
  std::vector<Tensor> wanted;
  std::vector<std::size_t> index;
  for (std::size_t p = 0; p < worker.size(); ++p) {
    if (!worker.parameters[p].requires_grad()) continue;
    wanted.push_back(worker.parameters[p]);
    index.push_back(p);
  }
  const ModelSpec& model = case_.model;
  const double coarse = model.has(Layer::bf16)  ? epsilon_of(at::kBFloat16)
                        : model.has(Layer::f16) ? epsilon_of(at::kHalf)
                                                : 0;
  std::vector<Tensor> gradients(wanted.size());
  if (loss.requires_grad()) gradients = torch::autograd::grad({loss}, wanted, {}, false, false, /*allow_unused=*/true);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const std::size_t p = index[i];
    const Tensor& ours = worker.parameters[p].grad();
    if (!ours.defined() || ours.numel() == 0) continue;
    Tensor want = gradients[i].defined() ? gradients[i].detach().clone() : at::zeros_like(ours);
    double scale = 0;
    for (const Replica& r : replicas_) scale += r.magnitude[p];
    if (base_[p].defined()) {
      want += base_[p];
      scale += base_[p].abs().max().to(at::kDouble).item<double>();
    }
    // Each of the up to a dozen backwards rounds a few times, in another order than one backward over all of them, and
    // where a 16-bit node is passed in that precision (f16 loses small gradients besides).
    const double bound = (64 * epsilon_of(at::kFloat) + 16 * coarse) * scale + (model.has(Layer::f16) ? 2e-4 : 5e-6);
    const double distance = (ours - want).abs().max().to(at::kDouble).item<double>();
    if (!(distance <= bound)) {
      union_difference_ = worker.model->named_parameters()[p].key() + " is off the union batch's gradient by " +
                          std::to_string(distance) + ", more than " + std::to_string(bound);
    }
  }
}

}  // namespace unisono::differential
