#pragma once

#include <ATen/core/Tensor.h>
#include <unisono/process_group.h>
#include <unisono/stats.h>

#include <memory>
#include <vector>

#include "reducer/bucket_plan.h"
#include "reducer/gradient_slot.h"

namespace unisono {

/// One message in the making.
struct Bucket {
  BucketSpec spec;
  Buffer buffer;
  int pending = 0;  ///< gradients still expected in this backward
  bool launched = false;
  bool ended = false;
  Work work;
  at::Tensor flat;  ///< the same memory, as a transform sees it
  BucketStats stats;
};

/// The memory of all buckets: one allocation per device. In CPU memory it comes from the group, so that the transport
/// can reduce it where it lies.
class Buckets {
 public:
  /// *Collective* (allocates). Places every slot; gradients that live in older buckets are carried over.
  Buckets(std::vector<BucketSpec> plan, std::vector<GradientSlot>& slots, ProcessGroup& group);

  std::vector<Bucket>& all() { return buckets_; }
  /// Null for a gradient that travels in no bucket (a sparse one).
  Bucket* of(std::size_t slot) {
    return bucket_of_[slot] < 0 ? nullptr : &buckets_[static_cast<std::size_t>(bucket_of_[slot])];
  }

 private:
  std::vector<Bucket> buckets_;
  std::vector<int> bucket_of_;
};

}  // namespace unisono
