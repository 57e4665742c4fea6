#include <unisono/c10d.h>
#include <unisono/torch_backend.h>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "comm/torch_backend/torch_backend.h"

namespace unisono {

c10::intrusive_ptr<c10d::Backend> make_torch_backend(std::shared_ptr<ProcessGroup> group,
                                                     c10::intrusive_ptr<c10d::Backend> beside) {
  if (!group) throw Error(ErrorCode::invalid_argument, "make_torch_backend: no group was given");
  return c10::make_intrusive<TorchBackend>(std::move(group), std::move(beside));
}

std::shared_ptr<ProcessGroup> make_group_on_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  std::chrono::duration<double> timeout) {
  struct GroupWithStore {
    std::shared_ptr<Store> store;
    std::shared_ptr<ProcessGroup> group;
  };
  auto kept = std::make_shared<GroupWithStore>();
  GroupOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = options.start_timeout = std::chrono::ceil<std::chrono::nanoseconds>(timeout);
  if (size > 1) options.store = kept->store = make_store(store);
  kept->group = make_group("auto", options);
  return {kept, kept->group.get()};
}

}  // namespace unisono
