#pragma once

#include <unisono/buffer.h>

#include <cstddef>
#include <functional>

#include "comm/host_layout.h"

namespace unisono {

/// Memory with nothing in it yet, aligned for every dtype.
Buffer scratch(std::size_t count, Dtype dtype);
/// The same, all zero.
Buffer zeros(std::size_t count, Dtype dtype);
/// Elements [begin, begin + count) of `buffer`.
Buffer part_of(const Buffer& buffer, std::size_t begin, std::size_t count);
/// As bytes.
Buffer bytes_of(const Buffer& buffer);
/// Elements of `from` to the beginning of `to`, whose dtype is f32 where the other's may be f16 or bf16.
void copy_widened(const Buffer& from, const Buffer& to);

/// One block per rank, as they travel between hosts: the blocks of a host's ranks, one behind the other, are cut into a
/// part per carrier.
class HostBlocks {
 public:
  /// `block`: elements per rank.
  HostBlocks(const HostLayout& layout, std::size_t block);

  /// Elements of a part; all are equally long, the last of a host may have nothing in it.
  std::size_t part() const { return part_; }

  /// A run of elements of `rank`'s block, and where it lies: in which part of which host, which has this rank in the
  /// carriers' group.
  struct Piece {
    std::size_t rank = 0, in_block = 0;
    std::size_t host = 0, host_rank = 0, carrier = 0, in_part = 0;
    std::size_t count = 0;
  };
  void for_each(const std::function<void(const Piece&)>& use) const;

 private:
  const HostLayout& layout_;
  std::size_t block_;
  std::size_t part_;
};

}  // namespace unisono
