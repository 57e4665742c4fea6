#include "comm/issuer/engine.h"

#include <algorithm>
#include <cstddef>

namespace unisono {

std::vector<DataCall> split(const DataCall& call, std::size_t length) {
  std::vector<DataCall> parts;
  for (std::size_t at = 0; at < call.out.count; at += length) {
    parts.push_back(call);
    Buffer& out = parts.back().out;
    out.data = static_cast<std::byte*>(out.data) + at * size_of(out.dtype);
    out.count = std::min(length, call.out.count - at);
  }
  return parts;
}

}  // namespace unisono
