#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <unisono/process_group.h>

#include "reducer/bucket_plan.h"
#include "reducer/gradient_slot.h"

namespace unisono {

/// One message in the making.
struct Bucket {
  BucketSpec spec;
  Buffer buffer;
  int pending = 0;  ///< gradients still expected in this backward
  bool launched = false;
  Work work;
  std::int64_t first_ready_ns = 0;
  std::int64_t launched_ns = 0;
};

/// The memory of all buckets: one allocation per device. In CPU memory it comes from the group, so that the transport can
/// reduce it where it lies.
class Buckets {
 public:
  /// *Collective* (allocates). Places every slot; gradients that live in older buckets are carried over.
  Buckets(std::vector<BucketSpec> plan, std::vector<GradientSlot>& slots, ProcessGroup& group);

  std::vector<Bucket>& all() { return buckets_; }
  Bucket& of(std::size_t slot) { return buckets_[bucket_of_[slot]]; }
  std::size_t index_of(std::size_t slot) const { return bucket_of_[slot]; }

 private:
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_;
};

}  // namespace unisono
