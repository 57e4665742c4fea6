// Optimizer steps inside backward.
#include <cmath>

#include <ATen/ATen.h>

#include "reducer/reducer.h"

namespace unisono {

void Reducer::bucket_ended(std::size_t index) {
  if (!updates_early()) return;
  const Bucket& bucket = buckets_->all()[index];
  if (bucket.work.withheld()) return;  // a rank abandoned this backward
  const auto& produced = bucket.work.control().words;
  std::vector<NamedTensor> ready;
  for (std::size_t i = 0; i < bucket.spec.members.size(); ++i) {
    if ((produced[i / 64] >> i % 64 & 1) == 0) continue;
    const std::size_t member = bucket.spec.members[i];
    slots_[member].settle(true);
    updated_.set(member);
    ready.push_back({slots_[member].name(), slots_[member].parameter()});
  }
  if (!ready.empty()) update_(ready);
}

// Two phases where one bucket's step depends on all others: first every gradient is averaged, then all are used.
void Reducer::update_rest(const BackwardMessage& verdict) {
  at::NoGradGuard no_grad;
  std::vector<NamedTensor> ready;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!verdict.produced.test(i) || updated_.test(i)) continue;
    updated_.set(i);
    ready.push_back({slots_[i].name(), slots_[i].parameter()});
  }
  if (max_norm_) {
    double square = 0;
    for (const NamedTensor& p : ready) {
      const double norm = p.tensor.grad().norm().to(at::kDouble).item<double>();
      square += norm * norm;
    }
    const double factor = *max_norm_ / (std::sqrt(square) + 1e-6);
    if (factor < 1) {
      for (const NamedTensor& p : ready) p.tensor.grad().mul_(factor);
    }
  }
  if (!ready.empty()) update_(ready);
}

}  // namespace unisono
