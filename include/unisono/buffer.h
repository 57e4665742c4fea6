#pragma once

#include <unisono/dtype.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace unisono {

/// Where memory lives.
struct Device {
  enum class Kind : std::uint8_t { cpu, cuda } kind = Kind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// A run of elements that a process group reads or writes.
/// `owner` keeps the memory alive for as long as any call uses it; it may be empty when the caller promises to keep
/// the memory until the call's `Work` has ended.
struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;  ///< elements, not bytes
  Dtype dtype = Dtype::f32;
  Device device = {};
  std::shared_ptr<void> owner = nullptr;

  std::size_t bytes() const noexcept { return count * size_of(dtype); }
};

}  // namespace unisono
