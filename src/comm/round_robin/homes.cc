#include "comm/round_robin/homes.h"

#include <iterator>

namespace unisono {

void Homes::add(const Buffer& memory, std::size_t group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(by_address_, [](const auto& entry) { return entry.second.owner.expired(); });
  by_address_[static_cast<const std::byte*>(memory.data)] = {memory.bytes(), group, memory.owner};
}

std::optional<std::size_t> Homes::find(const Buffer& buffer) {
  if (buffer.count == 0) return std::nullopt;
  const auto* begin = static_cast<const std::byte*>(buffer.data);
  const std::lock_guard lock(mutex_);
  auto found = by_address_.upper_bound(begin);
  while (found != by_address_.begin()) {
    --found;
    if (!found->second.owner.expired()) {
      const bool inside = begin + buffer.bytes() <= found->first + found->second.bytes;
      return inside ? std::optional(found->second.group) : std::nullopt;
    }
    found = by_address_.erase(found);
  }
  return std::nullopt;
}

}  // namespace unisono
