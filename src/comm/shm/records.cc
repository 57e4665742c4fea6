#include "comm/shm/records.h"

#include <cstring>
#include <span>

#include "comm/reduce_kernels.h"

namespace unisono::shm {

void write_record(const ControlRecord& record, std::byte* to) {
  const std::size_t words = 8 * record.words.size();
  if (words > 0) std::memcpy(to, record.words.data(), words);
  if (!record.sums.empty()) std::memcpy(to + words, record.sums.data(), 8 * record.sums.size());
}

ControlRecord combine_records(const std::vector<const std::byte*>& records, const ControlRecord& shape) {
  ControlRecord out{std::vector<std::uint64_t>(shape.words.size()), std::vector<double>(shape.sums.size())};
  std::vector<const void*> inputs(records.begin(), records.end());
  void* words[] = {out.words.data()};
  if (!out.words.empty()) tree_reduce(inputs, words, out.words.size(), Dtype::i64, ReduceOp::bit_or, 1);
  for (auto& input : inputs) input = static_cast<const std::byte*>(input) + 8 * out.words.size();
  void* sums[] = {out.sums.data()};
  if (!out.sums.empty()) tree_reduce(inputs, sums, out.sums.size(), Dtype::f64, ReduceOp::sum, 1);
  return out;
}

}  // namespace unisono::shm
