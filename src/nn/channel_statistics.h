#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace unisono {

/// What one rank, or several together, know of the channels of a batch. Per channel, all in f64.
struct ChannelStatistics {
  double count = 0;             ///< values per channel
  std::vector<double> sum;      ///< of the values
  std::vector<double> squares;  ///< of their distances from their own mean, squared

  static std::size_t words(std::int64_t channels) { return 1 + 2 * static_cast<std::size_t>(channels); }
  std::vector<double> pack() const;
  static ChannelStatistics unpack(const double* words, std::int64_t channels);
};

/// Of a (N, C) or (N, C, ...) tensor on the CPU, contiguous in its suggested memory format. The order of additions
/// depends on the shape alone.
ChannelStatistics statistics_of(const at::Tensor& input);

/// Of the union of several batches: neighbours are combined in a balanced binary tree, and the squares by
///   squares_ab = squares_a + squares_b + (mean_b - mean_a)^2 * n_a * n_b / (n_a + n_b)
/// which never subtracts large numbers. Batches without values change nothing.
/// *Source*: Chan, Golub, LeVeque 1982; see include/unisono/sync_batch_norm.h.
ChannelStatistics combined(std::vector<ChannelStatistics> parts);

/// Per channel, the sums of `gradient` and of `gradient * (input - mean)`. Both tensors in the same memory format.
std::pair<std::vector<double>, std::vector<double>> gradient_sums(const at::Tensor& gradient, const at::Tensor& input,
                                                                  const at::Tensor& mean);

/// Per channel (gradient - shift - (input - mean) * slope) * invstd * weight. All per-channel tensors in the dtype of
/// `mean`.
at::Tensor input_gradient(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean,
                          const at::Tensor& shift, const at::Tensor& slope, const at::Tensor& invstd,
                          const at::Tensor& weight);

}  // namespace unisono
