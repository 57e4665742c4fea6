#include "comm/c10d/stream_fence.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>

namespace unisono {

StreamFence stream_fence(const Device& device) {
  if (device.kind == Device::Kind::cpu) return {};
  const c10::Device place(c10::kCUDA, static_cast<c10::DeviceIndex>(device.index));
  const auto current = [place] { return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(place); };
  const auto event = std::make_shared<c10::Event>(c10::kCUDA);
  event->record(current());
  return [event, current] { event->block(current()); };
}

}  // namespace unisono
