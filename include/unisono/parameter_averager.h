#pragma once

#include <unisono/named_tensor.h>
#include <unisono/process_group.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace unisono {

/// Model averaging: every rank trains on its own and from time to time all take the mean of the parameters. Not what
/// `DistributedDataParallel` computes: optimizer states see other gradients, and nothing overlaps with backward;
/// examples/model_averaging.py shows both in numbers.
/// *Threads*: the one that trains.
class ParameterAverager {
 public:
  /// Averages at every `period`-th call of `step`, not before call number `warmup`.
  /// *Throws* `invalid_argument` for a period below 1, a negative warmup, or a parameter whose dtype cannot be
  /// averaged.
  ParameterAverager(std::vector<NamedTensor> parameters, std::shared_ptr<ProcessGroup> group, std::int64_t period,
                    std::int64_t warmup = 0);

  /// From here on these are the parameters: a layer may have been replaced. The same on all ranks. Local.
  /// *Throws* as the constructor.
  void follow(std::vector<NamedTensor> parameters);
  /// To be called after each optimizer step, equally often on all ranks. Returns whether it averaged.
  /// *Collective* and *blocking* when it does.
  bool step();
  /// Averages now. *Collective*. *Blocks*.
  void average();
  std::int64_t steps() const { return steps_; }

 private:
  std::vector<NamedTensor> parameters_;
  std::shared_ptr<ProcessGroup> group_;
  std::int64_t period_;
  std::int64_t warmup_;
  std::int64_t steps_ = 0;
};

}  // namespace unisono
