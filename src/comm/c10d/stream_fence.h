#pragma once

#include <optional>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <unisono/buffer.h>

namespace unisono {

/// A point in the present stream of the calling thread that another thread's stream can wait for; nothing on CPUs.
class StreamFence {
 public:
  StreamFence() = default;
  explicit StreamFence(const Device& device) {
    if (device.kind == Device::Kind::cpu) return;
    device_ = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device.index));
    event_.emplace(c10::kCUDA);
    event_->record(current());
  }
  void make_current_stream_wait() {
    if (event_) event_->block(current());
  }

 private:
  c10::Stream current() const { return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device_); }

  c10::Device device_{c10::kCPU};
  std::optional<c10::Event> event_;
};

}  // namespace unisono
