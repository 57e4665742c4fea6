#include "comm/anonymous_memory.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <algorithm>

namespace unisono {

std::size_t memory_of_machine() noexcept {
  struct sysinfo info = {};
  if (sysinfo(&info) != 0) return 0;
  return (static_cast<std::size_t>(info.totalram) + info.totalswap) * info.mem_unit;
}

std::shared_ptr<void> anonymous_memory(std::size_t bytes) {
  if (bytes > memory_of_machine()) return nullptr;
  const std::size_t mapped = std::max<std::size_t>(bytes, 1);
  void* data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  return {data, [mapped](void* p) { munmap(p, mapped); }};
}

}  // namespace unisono
