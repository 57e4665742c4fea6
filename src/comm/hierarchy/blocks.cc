#include "comm/hierarchy/blocks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "base/float16.h"

namespace unisono {

Buffer scratch(std::size_t count, Dtype dtype) {
  const std::size_t bytes = std::max<std::size_t>(1, count * size_of(dtype));
  std::shared_ptr<std::byte[]> memory(new std::byte[bytes]);
  return {memory.get(), count, dtype, {}, memory};
}

Buffer zeros(std::size_t count, Dtype dtype) {
  Buffer out = scratch(count, dtype);
  std::memset(out.data, 0, out.bytes());
  return out;
}

Buffer part_of(const Buffer& buffer, std::size_t begin, std::size_t count) {
  Buffer out = buffer;
  out.data = static_cast<std::byte*>(buffer.data) + begin * size_of(buffer.dtype);
  out.count = count;
  return out;
}

Buffer bytes_of(const Buffer& buffer) {
  Buffer out = buffer;
  out.count = buffer.bytes();
  out.dtype = Dtype::u8;
  return out;
}

void copy_widened(const Buffer& from, const Buffer& to) {
  if (from.dtype == to.dtype) {
    std::memcpy(to.data, from.data, from.bytes());
    return;
  }
  const auto* in = static_cast<const std::uint16_t*>(from.data);
  auto* out = static_cast<float*>(to.data);
  if (from.dtype == Dtype::bf16) {
    for (std::size_t i = 0; i < from.count; ++i) out[i] = bf16_to_f32(in[i]);
  } else {
    for (std::size_t i = 0; i < from.count; ++i) out[i] = f16_to_f32(in[i]);
  }
}

HostBlocks::HostBlocks(const HostLayout& layout, std::size_t block)
    : layout_(layout), block_(block), part_((layout.widest() * block + layout.narrowest() - 1) / layout.narrowest()) {}

void HostBlocks::for_each(const std::function<void(const Piece&)>& use) const {
  for (std::size_t host = 0; host < layout_.hosts.size(); ++host) {
    const auto& ranks = layout_.hosts[host];
    for (std::size_t place = 0; place < ranks.size(); ++place) {
      for (std::size_t done = 0; done < block_;) {
        const std::size_t at = place * block_ + done;  // in the host's blocks
        const std::size_t carrier = at / part_;
        Piece piece{static_cast<std::size_t>(ranks[place]),
                    done,
                    host,
                    layout_.position(carrier, host),
                    carrier,
                    at % part_,
                    0};
        piece.count = std::min(block_ - done, part_ - piece.in_part);
        use(piece);
        done += piece.count;
      }
    }
  }
}

}  // namespace unisono
