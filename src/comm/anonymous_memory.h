#pragma once

#include <cstddef>
#include <memory>

namespace unisono {

/// Zeroed private memory, aligned to 4096 bytes, given back with the last copy; null when the system has no room for
/// it.
std::shared_ptr<void> anonymous_memory(std::size_t bytes);

/// Bytes of memory and swap this machine has in all.
std::size_t memory_of_machine() noexcept;

}  // namespace unisono
