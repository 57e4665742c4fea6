#pragma once

#include <unisono/dtype.h>

#include <cstddef>
#include <vector>

#include "comm/shm/layout.h"

namespace unisono::shm {

/// The ranks of a group as data sees them.
struct Team {
  ControlSegment segment;
  int rank = 0;
  int size = 1;
  std::vector<std::byte*> staging;  ///< one per rank
};

/// The data of one call.
struct Transfer {
  Operation operation = Operation::barrier;
  std::byte* out = nullptr;
  const std::byte* in = nullptr;
  std::size_t block =
      0;  ///< elements: of `in`, for reduce_scatter and all_to_all of `in` divided by the number of ranks
  Dtype dtype = Dtype::u8;
  ReduceOp op = ReduceOp::sum;  ///< avg has become sum with a divisor
  double divisor = 1;
  int root = 0;

  bool scatters() const { return operation == Operation::reduce_scatter || operation == Operation::all_to_all; }
  std::size_t block_bytes() const { return block * size_of(dtype); }
  std::size_t in_bytes(int size) const { return block_bytes() * (scatters() ? static_cast<std::size_t>(size) : 1); }
};

/// Part r of n elements cut into `size` parts at cache lines; `phase` is how many bytes the first lies behind a line's
/// begin.
struct Slice {
  std::size_t begin = 0;
  std::size_t count = 0;
};
Slice slice_of(std::size_t n, std::size_t element_bytes, int rank, int size, std::size_t phase = 0);

// Small calls take one round: every rank lays its data into its slot area before it enters, and after all have entered
// each takes what it needs from all slot areas. Nobody touches another's memory, so a rank is done at once.

/// Bytes that fit beside a control record of `control_bytes`.
std::size_t small_capacity(std::size_t control_bytes);
void lay_down_small(const Team& team, std::uint64_t sequence, const Transfer& transfer, std::size_t control_bytes);
void take_small(const Team& team, std::uint64_t sequence, const Transfer& transfer, std::size_t control_bytes);

/// Reduces this rank's slice over all ranks' `copies` into all of them.
void reduce_in_place(const Team& team, const Transfer& transfer, const std::vector<std::byte*>& copies,
                     std::size_t phase);

}  // namespace unisono::shm
