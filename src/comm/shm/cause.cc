#include "comm/shm/cause.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace unisono::shm {

Cause publish_cause(CauseArea& area, const Cause& mine) {
  std::uint32_t none = 0;
  if (area.state.compare_exchange_strong(none, 1)) {
    const std::string text = mine.error.what();
    area.code = static_cast<std::uint32_t>(mine.error.code());
    area.from = mine.from;
    area.length = static_cast<std::uint32_t>(std::min(text.size(), CauseArea::kText));
    std::memcpy(area.text, text.data(), area.length);
    area.state.store(2);
    return mine;
  }
  // Another rank was first. It writes for less than a microsecond; if it died in the middle, our own cause has to do.
  for (int tries = 0; tries < 10'000; ++tries) {
    if (auto cause = read_cause(area)) return *cause;
    sched_yield();
  }
  return mine;
}

std::optional<Cause> read_cause(const CauseArea& area) {
  if (area.state.load(std::memory_order_acquire) != 2) return std::nullopt;
  return Cause{Error(static_cast<ErrorCode>(area.code), std::string(area.text, area.length)), area.from};
}

}  // namespace unisono::shm
