#include <unisono/c10d.h>

#include <map>
#include <mutex>
#include <utility>

#include "comm/c10d/engine.h"
#include "comm/issuer/issued_group.h"
#include "comm/serial/serial_group.h"
#include "comm/torch_backend/torch_backend.h"

namespace unisono {
namespace {

// The only state outside an object: two adapters over one c10d group would issue its collectives in an order that
// differs between ranks, so a group that has one gets the same again. An adapter keeps its c10d group alive, so its
// address is not given out again.
struct Adapters {
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, std::weak_ptr<ProcessGroup>> of_group;
};

Adapters& adapters() {
  static Adapters instance;
  return instance;
}

// A world of one needs no engine, unless for memory that only an engine reaches.
std::shared_ptr<ProcessGroup> adapt(c10::intrusive_ptr<c10d::ProcessGroup> group, bool ordered) {
  auto engine = std::make_unique<C10dEngine>(std::move(group), ordered);
  if (engine->info().size > 1 || engine->serves(Device::Kind::cuda))
    return std::make_shared<IssuedGroup>(std::move(engine));
  GroupOptions options;
  options.timeout = engine->info().timeout;
  return make_serial_group(options);
}

// Beside a backend for CUDA ours serves the CPU alone, so such a group stays as it is.
std::shared_ptr<ProcessGroup> own_transport(c10d::ProcessGroup& group) {
  if (!group.hasBackendForDeviceType(c10::kCPU) || group.hasBackendForDeviceType(c10::kCUDA)) return nullptr;
  const auto backend = group.getBackend(c10::kCPU);
  const auto* ours = dynamic_cast<const TorchBackend*>(backend.get());
  return ours ? ours->group() : nullptr;
}

std::shared_ptr<ProcessGroup> find_or_adapt(c10::intrusive_ptr<c10d::ProcessGroup> group, bool ordered) {
  if (!group) throw Error(ErrorCode::invalid_argument, "a c10d group is needed, and none was given");
  if (auto ours = own_transport(*group)) return ours;
  auto& known = adapters();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.of_group, [](const auto& entry) { return entry.second.expired(); });
  const auto* address = group.get();
  auto adapter = known.of_group[address].lock();
  if (!adapter) {
    const bool one = group->getSize() == 1;  // needs no order, and would not keep the group alive
    adapter = adapt(std::move(group), ordered);
    if (!one) known.of_group[address] = adapter;
  }
  return adapter;
}

}  // namespace

std::shared_ptr<ProcessGroup> make_c10d_group(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return find_or_adapt(std::move(group), false);
}

std::shared_ptr<ProcessGroup> make_ordered_group(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  auto made = find_or_adapt(std::move(group), true);
  if (made->name().starts_with("c10d/"))
    throw Error(ErrorCode::invalid_argument, "make_ordered_group: the group is already used as " + made->name() +
                                                 "; make another of the same ranks");
  return made;
}

}  // namespace unisono
