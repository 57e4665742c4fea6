#include "differential/runner.h"

#include <sstream>

#include "differential/rank_run.h"
#include "differential/reference.h"

namespace unisono::differential {
namespace {

using at::Tensor;

std::string text_of(const Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream out;
  out.precision(9);
  const Tensor plain = copy_of(tensor);
  const Tensor flat = (plain.is_complex() ? at::view_as_real(plain) : plain).flatten().to(at::kDouble);
  for (std::int64_t i = 0; i < std::min<std::int64_t>(flat.numel(), 30); ++i) out << flat[i].item<double>() << " ";
  return out.str() + at::toString(tensor.scalar_type());
}

class Comparison {
 public:
  Comparison(const Case& c, const std::vector<RankRecord>& ranks) : case_(c), ranks_(ranks), reference_(c) {}

  std::optional<std::string> first_difference() {
    const auto actions = actions_of(case_.program);
    for (std::size_t i = 0; i < actions.size(); ++i) {
      reference_.perform(actions[i]);
      std::optional<std::string> difference = outcomes(i);
      if (!difference) difference = tensors(i, actions[i].kind == Action::Kind::step);
      if (!difference && !reference_.union_difference().empty()) difference = reference_.union_difference();
      if (difference) return "after action " + std::to_string(i) + " (" + describe(actions[i]) + "): " + *difference;
      adopt(i);
    }
    return std::nullopt;
  }

 private:
  std::optional<std::string> outcomes(std::size_t action) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (action >= ranks_[r].after.size()) return "rank " + std::to_string(r) + " stopped: " + ranks_[r].error;
      const auto& got = ranks_[r].after[action].outcomes;
      const auto& expected = reference_.expected(r);
      for (std::size_t i = 0; i < std::max(got.size(), expected.size()); ++i) {
        if (i >= got.size()) return "rank " + std::to_string(r) + " stopped: " + ranks_[r].error;
        if (i >= expected.size()) return "rank " + std::to_string(r) + " made an attempt too many";
        std::string missing;
        for (const std::string& part : expected[i].parts) {
          if (got[i].find(part) == std::string::npos) missing += " [" + part + "]";
        }
        if (missing.empty() && !(expected[i].parts.empty() && !got[i].empty())) continue;
        return "rank " + std::to_string(r) + ", attempt " + std::to_string(i) + ": expected " +
               (missing.empty() ? "no error" : "an error with" + missing) +
               ", got: " + (got[i].empty() ? "none" : got[i]);
      }
    }
    return std::nullopt;
  }

  std::optional<std::string> tensors(std::size_t action, bool step) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const Snapshot& ours = ranks_[r].after[action];
      if (ours.gradients.empty()) return "rank " + std::to_string(r) + " stopped: " + ranks_[r].error;
      Replica& replica = reference_.replicas()[r];
      for (std::size_t p = 0; p < replica.size(); ++p) {
        const Tensor& expected = replica.parameters[p].grad();
        const std::string name = "rank " + std::to_string(r) + ", " + replica.model->named_parameters()[p].key();
        if (!close(ours.gradients[p], expected, reference_.bound(p)))
          return described(name + ".grad", ours.gradients[p], expected) + " within " +
                 std::to_string(reference_.bound(p));
        const Tensor& first = ranks_[0].after[action].gradients[p];
        if (reference_.synchronised() && !same_bits(ours.gradients[p], first)) {
          return described(name + ".grad differs from rank 0's", ours.gradients[p], first);
        }
        if (step && !same_bits(ours.parameters[p], replica.parameters[p])) {
          return described(name, ours.parameters[p], replica.parameters[p]);
        }
      }
    }
    return std::nullopt;
  }

  static std::string described(const std::string& name, const Tensor& ours, const Tensor& expected) {
    return name + " is " + text_of(ours) + ", expected " + text_of(expected);
  }

  static bool close(const Tensor& ours, const Tensor& expected, double bound) {
    if (bound == 0 || !ours.defined() || !expected.defined()) return same_bits(ours, expected);
    if (ours.numel() == 0) return true;
    return (ours - expected).abs().max().to(at::kDouble).item<double>() <= bound;
  }

  // Where bits may differ the reference goes on from ours, so that what follows is compared by bits again.
  void adopt(std::size_t action) {
    at::NoGradGuard no_grad;
    for (Replica& replica : reference_.replicas()) {
      for (std::size_t p = 0; p < replica.size(); ++p) {
        if (reference_.bound(p) == 0 || !replica.parameters[p].grad().defined()) continue;
        replica.parameters[p].mutable_grad().copy_(ranks_[replica.rank].after[action].gradients[p]);
      }
    }
  }

  const Case& case_;
  const std::vector<RankRecord>& ranks_;
  Reference reference_;
};

}  // namespace

std::optional<std::string> difference_of(const Case& c, RankPool& pool) {
  std::vector<RankRecord> records(static_cast<std::size_t>(c.world));
  const auto failures = pool.run(c.world, [&](const std::shared_ptr<ProcessGroup>& group) {
    RankRecord& record = records[static_cast<std::size_t>(group->rank())];
    record = run_rank(c, group);
    return record.error.empty();
  });
  if (!failures.empty()) return failures;
  auto difference = Comparison(c, records).first_difference();
  if (difference) pool.renew(c.world);  // whatever went wrong, the next case shall not suffer from it
  return difference;
}

}  // namespace unisono::differential
