#pragma once

#include <unisono/distributed_data_parallel.h>

#include <functional>
#include <memory>
#include <vector>

#include "nn/buffer_sync.h"
#include "nn/wrappable.h"
#include "reducer/reducer.h"

namespace unisono {

struct DataParallel::State {
  void wrap(std::int64_t first_step);

  std::vector<NamedTensor> parameters;
  std::vector<ParameterMark> wrapped;  // as they were when the reducer was made
  mutable std::size_t key = 0;         // of the module's parameters when they were last compared
  std::vector<NamedTensor> buffers;
  std::shared_ptr<ProcessGroup> group;
  DistributedDataParallelOptions options;
  std::unique_ptr<Reducer> reducer;
  std::function<void(const std::vector<NamedTensor>&)> update;  // the optimizer in backward
  StepInBackwardOptions update_options;
  std::unique_ptr<BufferSync> buffer_sync;
  int user = 0;                 // which of the wrappers on the group
  std::int64_t buffers_at = 0;  // synchronisations when buffers were last brought; -1: never
};

}  // namespace unisono
