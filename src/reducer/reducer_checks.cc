// What ranks learn about each other at the end of a backward, and what of it is an error: the same one on all of them.
#include <ATen/ATen.h>

#include "reducer/reducer.h"
#include "reducer/replica_sample.h"

namespace unisono {

void Reducer::note_nonfinite(const Bucket& bucket) {
  at::NoGradGuard no_grad;
  if (at::isfinite(bucket.flat).all().item<bool>()) return;
  for (std::size_t member : bucket.spec.members) {
    if (!at::isfinite(slots_[member].flat_view()).all().item<bool>()) message_.nonfinite.set(member);
  }
  message_.nonfinite_ranks.set(static_cast<std::size_t>(group_->rank()));
}

void Reducer::check_verdict(const BackwardMessage& verdict) const {
  if (verdict.abandoned.any()) {
    throw Error(
        ErrorCode::mismatch,
        "rank " + verdict.abandoned.list() + " threw in its backward of step " + std::to_string(step_) +
            "; no rank has averaged gradients for this step. See the error of that rank; call zero_grad() and run the "
            "step again on all ranks, or stop.");
  }
  check_accumulation(verdict);
  check_replicas(verdict);
}

void Reducer::report(const BackwardMessage& verdict) const {
  const std::string step = std::to_string(step_ - 1);
  if (verdict.nonfinite.any()) {
    throw Error(ErrorCode::invalid_argument, "the gradient of " + names_of(verdict.nonfinite) +
                                                 " held an infinity or NaN in step " + step + ", on rank " +
                                                 verdict.nonfinite_ranks.list() + ", before it was averaged");
  }
  if (options_.strict && verdict.silent.any()) {
    throw Error(ErrorCode::invalid_argument, "strict: no gradient reached " + names_of(verdict.silent) +
                                                 " on at least one rank in step " + step +
                                                 "; the averages are right, and without `strict` this is no error");
  }
}

void Reducer::check_accumulation(const BackwardMessage& verdict) const {
  int first = -1;  // a rank that says how many backwards it sums up
  for (int r = 0; r < group_->size(); ++r) {
    const int count = verdict.backwards.of(r);
    if (count == 0) continue;
    if (first < 0) first = r;
    const int before = verdict.backwards.of(first);
    if (before == count) continue;
    throw Error(
        ErrorCode::mismatch,
        "rank " + std::to_string(first) + " sums " + std::to_string(before) + " backwards in step " +
            std::to_string(step_) + ", rank " + std::to_string(r) + " sums " + std::to_string(count) +
            ": their mean is the gradient of no batch. Enter no_sync for the same backwards on every rank; where "
            "ranks accumulate different numbers of micro-batches on purpose, wrap their losses in weight(loss, n), "
            "or set uneven_accumulation.");
  }
}

void Reducer::check_replicas(const BackwardMessage& verdict) const {
  std::uint64_t first = 0;
  for (std::uint64_t sample : verdict.replicas) {
    if (sample == 0) continue;
    if (first == 0) first = sample;
    if (sample != first) name_first_difference();
  }
}

void Reducer::name_first_difference() const {
  const auto world = static_cast<std::size_t>(group_->size());
  const std::size_t n = parameters_.size();
  std::vector<std::uint64_t> mine, all(world * n);
  for (const at::Tensor& p : parameters_) mine.push_back(hash_of_bits(p));
  CallOptions options;
  options.tag = {step_, -1, "replica hashes"};
  group_->all_gather({all.data(), all.size(), Dtype::i64}, {mine.data(), n, Dtype::i64}, options).wait();
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t r = 1; r < world; ++r) {
      if (all[r * n + i] == all[i]) continue;
      throw Error(
          ErrorCode::mismatch,
          "the replicas have drifted apart before step " + std::to_string(step_) + ": parameter '" + slots_[i].name() +
              "' differs between rank 0 and rank " + std::to_string(r) +
              ". Every rank must start from the same state and take the same optimizer steps: compare learning rates, "
              "loss scales, clipping, and steps that one rank leaves out. check_replicas = false lets it pass.");
    }
  }
  throw Error(ErrorCode::internal, "samples of the replicas differ but their bits do not; please report this");
}

}  // namespace unisono
