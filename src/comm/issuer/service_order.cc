#include "comm/issuer/service_order.h"

namespace unisono {

std::optional<std::int64_t> ServiceOrder::next() {
  if (waiting_.empty() || started_ - agreed_ >= kMoving) return std::nullopt;
  const std::int64_t sequence = std::get<1>(*waiting_.begin());
  waiting_.erase(waiting_.begin());
  ++started_;
  return sequence;
}

}  // namespace unisono
