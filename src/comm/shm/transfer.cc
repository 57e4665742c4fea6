#include "comm/shm/transfer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "comm/reduce_kernels.h"

namespace unisono::shm {
namespace {

// Where a record of this many bytes ends in a slot area; records that ride in the header take nothing.
std::size_t record_space(std::size_t control_bytes) {
  if (control_bytes <= kInlineControl) return 0;
  return std::min((control_bytes + kLine - 1) / kLine * kLine, kSlotBytes);
}

}  // namespace

Slice slice_of(std::size_t n, std::size_t element_bytes, int rank, int size, std::size_t phase) {
  const auto cut = [&](int r) -> std::size_t {
    if (r <= 0) return 0;
    if (r >= size) return n;
    const std::size_t lines = (phase + n * element_bytes + kLine - 1) / kLine;
    const std::size_t byte = lines * static_cast<std::size_t>(r) / static_cast<std::size_t>(size) * kLine;
    return byte <= phase ? 0 : std::min(n, (byte - phase) / element_bytes);
  };
  const std::size_t begin = cut(rank);
  return {begin, cut(rank + 1) - begin};
}

std::size_t small_capacity(std::size_t control_bytes) {
  return control_bytes > kSlotBytes ? 0 : kSlotBytes - record_space(control_bytes);
}

void lay_down_small(const Team& team, std::uint64_t sequence, const Transfer& t, std::size_t control_bytes) {
  if (t.operation == Operation::broadcast && t.root != team.rank) return;
  std::byte* area =
      slot_area(team.staging[static_cast<std::size_t>(team.rank)], sequence) + record_space(control_bytes);
  if (const std::size_t bytes = t.in_bytes(team.size)) std::memcpy(area, t.in, bytes);
}

void take_small(const Team& team, std::uint64_t sequence, const Transfer& t, std::size_t control_bytes) {
  const std::size_t bytes = t.block_bytes();
  if (bytes == 0) return;
  std::array<const void*, kMaxRanks> areas;
  for (int r = 0; r < team.size; ++r) {
    areas[static_cast<std::size_t>(r)] = slot_area(team.staging[static_cast<std::size_t>(r)], sequence) +
                                         record_space(control_bytes) +
                                         (t.scatters() ? static_cast<std::size_t>(team.rank) * bytes : 0);
  }
  const std::span<const void* const> inputs(areas.data(), static_cast<std::size_t>(team.size));
  switch (t.operation) {
    case Operation::all_reduce:
    case Operation::reduce_scatter: {
      void* outputs[] = {t.out};
      tree_reduce(inputs, outputs, t.block, t.dtype, t.op, t.divisor);
      break;
    }
    case Operation::broadcast:
      if (t.root != team.rank) std::memcpy(t.out, inputs[static_cast<std::size_t>(t.root)], bytes);
      break;
    case Operation::all_gather:
    case Operation::all_to_all:
      for (std::size_t r = 0; r < inputs.size(); ++r) std::memcpy(t.out + r * bytes, inputs[r], bytes);
      break;
    case Operation::barrier:
    case Operation::allocate:
      break;
  }
}

void reduce_in_place(const Team& team, const Transfer& t, const std::vector<std::byte*>& copies, std::size_t phase) {
  const Slice mine = slice_of(t.block, size_of(t.dtype), team.rank, team.size, phase);
  if (mine.count == 0) return;
  std::array<const void*, kMaxRanks> inputs;
  std::array<void*, kMaxRanks> outputs;
  const auto n = static_cast<std::size_t>(team.size);
  for (std::size_t r = 0; r < n; ++r) {
    outputs[r] = copies[r] + mine.begin * size_of(t.dtype);
    inputs[r] = outputs[r];
  }
  tree_reduce(std::span(inputs.data(), n), std::span(outputs.data(), n), mine.count, t.dtype, t.op, t.divisor);
}

}  // namespace unisono::shm
