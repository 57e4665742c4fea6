#pragma once

#include <unisono/distributed_data_parallel.h>
#include <unisono/process_group.h>

#include <functional>
#include <vector>

#include "reducer/bucket_plan.h"

namespace unisono {

/// Brings the buffers of all ranks to one state, by the policy or by the user's hook.
///
/// What the ranks agreed on (names, shapes, dtypes) is remembered, so that nothing is compared as long as nothing
/// changes anywhere. A rank whose buffers have changed *withholds* the first message as it was agreed on: all ranks see
/// that, compare their descriptions, and either go on with the new ones or raise the first difference.
class BufferSync {
 public:
  using Hook = DataParallel::BufferHook;

  BufferSync(const std::vector<NamedTensor>& buffers, BufferPolicy policy);

  void set_hook(Hook hook) { hook_ = std::move(hook); }
  /// From here on these are the buffers, on all ranks: names, shapes, dtypes.
  void agree_on(const std::vector<NamedTensor>& buffers);
  /// Those with other names than the ranks agreed on.
  std::vector<NamedTensor> added_to(const std::vector<NamedTensor>& buffers) const;
  /// Whether there is anything to bring.
  bool empty() const { return plan_.empty() && !hook_; }
  /// `root`: whose buffers they become where the policy says rank 0's; another rank's when rank 0 has left a join.
  /// *Collective*. *Blocks*. *Throws* `mismatch` naming the first buffer that differs, on all ranks; the group stays
  /// usable.
  void run(const std::vector<NamedTensor>& buffers, int root, ProcessGroup& group);

 private:
  struct Entry {
    std::string name;
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    Device device;
  };
  bool are_as_agreed(const std::vector<NamedTensor>& buffers) const;

  BufferPolicy policy_;
  Hook hook_;
  std::vector<Entry> agreed_;
  std::vector<BucketSpec> plan_;
};

}  // namespace unisono
