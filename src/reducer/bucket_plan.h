#pragma once

#include <unisono/buffer.h>
#include <unisono/options.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace unisono {

/// What the plan needs to know of a gradient.
struct GradientSpec {
  std::size_t bytes = 0;
  Dtype dtype = Dtype::f32;
  Device device = {};
};

/// One message: some gradients of one dtype and device, laid one after the other.
struct BucketSpec {
  std::vector<std::size_t> members;  ///< indices of gradients, in the order they are expected to become ready
  std::vector<std::size_t> offsets;  ///< bytes from the start of the bucket, each a multiple of kAlignment
  std::size_t bytes = 0;             ///< padded to kAlignment
  Dtype dtype = Dtype::f32;
  Device device = {};
};

/// Gradients and slices begin on their own cache line.
inline constexpr std::size_t kAlignment = 64;

/// Sizes at which buckets close.
struct BucketCaps {
  std::size_t first = 0;  ///< of the first bucket of each dtype and device
  std::size_t rest = 0;
  std::vector<std::size_t> list = {};  ///< of each bucket in turn, when not empty

  std::size_t of(std::size_t bucket) const {
    if (!list.empty()) return list[std::min(bucket, list.size() - 1)];
    return bucket == 0 ? first : rest;
  }

  /// torch's rule: 25 MiB, and a first bucket of 1 MiB only when no cap is given; `naive` gives every gradient its own.
  /// *Throws* `invalid_argument` for a cap that is negative or not a number.
  static BucketCaps from(const DistributedDataParallelOptions& options);
};

/// Fills buckets in `order` (a permutation of the gradients: the order in which they become ready), one open bucket per
/// dtype and device; a bucket closes when its size reaches the cap. Buckets are launched in the order in which their
/// last member becomes ready.
std::vector<BucketSpec> plan_buckets(std::span<const GradientSpec> gradients, std::span<const std::size_t> order,
                                     BucketCaps caps);

}  // namespace unisono
