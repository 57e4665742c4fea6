#pragma once

#include <unisono/gradient_transform.h>

#include <cstdint>
#include <memory>

namespace unisono {

/// Gradients travel as f16 (range 6e-8 to 65,504) or bf16 (range of f32, 8 bits of mantissa): half the bytes of f32.
/// Divided by the number of ranks before they are rounded, so that no sum overflows. Yields a mean.
std::shared_ptr<GradientTransform> f16_transform();
std::shared_ptr<GradientTransform> bf16_transform();

/// Gradients travel as one byte per element, scaled by the largest magnitude in the bucket on any rank: a quarter of
/// f32's bytes per peer, gathered (size - 1 times). What rounding lost is added in the next step (error feedback).
/// Yields a mean. *Source*: Seide et al., 1-bit SGD, Interspeech 2014, for the error feedback; the quantiser is linear.
std::shared_ptr<GradientTransform> int8_transform(bool error_feedback = true);

/// Low-rank approximation: a gradient, as a matrix of n x m, travels as n x rank and m x rank numbers.
struct PowerSGDOptions {
  int rank = 1;
  std::int64_t start_step = 10;  ///< plain means before
  bool error_feedback = true;
  bool warm_start = true;      ///< the last step's right factor instead of a random one
  double min_compression = 2;  ///< gradients that shrink by less than this factor travel whole
  std::uint64_t seed = 0;      ///< of the first right factors; the same on all ranks
};
/// Yields a mean. State: right factors and errors by parameter name, the errors this rank's own.
/// *Source*: Vogels et al., PowerSGD, NeurIPS 2019, arXiv 1905.13727, algorithm 1.
std::shared_ptr<GradientTransform> power_sgd_transform(const PowerSGDOptions& options = {});

/// Global means until `start_step`; from then on means over `local` alone (null: this rank alone), and the parameters
/// are to be averaged from time to time; see averaging.h.
/// *Source*: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv 1808.07217.
std::shared_ptr<GradientTransform> post_local_sgd_transform(std::int64_t start_step,
                                                            std::shared_ptr<ProcessGroup> local = nullptr);

}  // namespace unisono
