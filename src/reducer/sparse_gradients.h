#pragma once

#include <ATen/core/Tensor.h>
#include <unisono/process_group.h>

#include <cstdint>
#include <vector>

namespace unisono {

/// One parameter's sparse gradient on this rank; undefined gives nothing.
struct SparseGradient {
  at::Tensor parameter;
  at::Tensor gradient;
};

/// The sums over ranks divided by `divisor` (0 gives an empty gradient), coalesced, one per entry, the same bits on all
/// ranks. Indices and values are gathered, padded to the longest rank's, and added in one order on all ranks (torch's,
/// of equal indices). Where some rank's gradient is dense, so is the sum. `bytes` grows by what this rank handed to
/// collectives. *Collective*. *Blocks*.
std::vector<at::Tensor> average_sparse(const std::vector<SparseGradient>& gradients, double divisor,
                                       ProcessGroup& group, std::int64_t step, std::size_t& bytes);

}  // namespace unisono
