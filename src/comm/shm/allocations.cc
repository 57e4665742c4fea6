#include "comm/shm/allocations.h"

namespace unisono::shm {

Allocation::~Allocation() {
  if (!registry || mark.forked()) return;
  registry->forget(*this);
  own().give_back();  // peers may still map it, but nobody can use it any more
}

void Allocations::add(const std::shared_ptr<Allocation>& allocation) {
  std::lock_guard lock(mutex_);
  by_address_[allocation->own().data()] = allocation;
}

void Allocations::forget(const Allocation& allocation) {
  std::lock_guard lock(mutex_);
  by_address_.erase(allocation.own().data());
}

Place Allocations::find(const void* data, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  std::shared_ptr<Allocation> allocation;  // outlives the lock: letting go of the last copy takes the lock again
  std::lock_guard lock(mutex_);
  auto it = by_address_.upper_bound(begin);
  if (it == by_address_.begin()) return {};
  --it;
  allocation = it->second.lock();
  if (!allocation) return {};
  const auto offset = static_cast<std::uint64_t>(begin - it->first);
  if (offset + bytes > allocation->own().bytes()) return {};
  return {allocation, offset};
}

}  // namespace unisono::shm
