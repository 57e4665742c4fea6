#pragma once

#include <torch/torch.h>

#include <optional>
#include <vector>

namespace unisono::differential {

/// The mean of one tensor per rank as the library defines it: a balanced binary tree over ranks, element by element,
/// then one division by `divisor` (by the number of ranks when not given; zeros for 0). 16-bit types in f32, rounded
/// once. In logical order. Shares no code with the library.
at::Tensor average(const std::vector<at::Tensor>& per_rank, std::optional<double> divisor);

/// The distance between 1 and the next number.
double epsilon_of(at::ScalarType type);

}  // namespace unisono::differential
