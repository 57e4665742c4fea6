#include "comm/issuer/call_header.h"

#include <bit>
#include <span>

namespace unisono {
namespace {

bool reduces(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::reduce_scatter;
}

bool same_call(const CallHeader& a, const CallHeader& b) {
  return a.magic == b.magic && a.sequence == b.sequence && a.count == b.count && a.step == b.step &&
         a.bucket == b.bucket && a.root == b.root && a.priority == b.priority && a.may_round == b.may_round &&
         a.divide_by_sum == b.divide_by_sum && a.words == b.words && a.sums == b.sums && a.operation == b.operation &&
         a.dtype == b.dtype && a.device == b.device && a.op == b.op && a.what == b.what;
}

// Splits at the largest power of two below the count, like every reduction of ours.
double tree_sum(std::span<const ControlRecord> records, std::size_t index) {
  if (records.size() == 1) return records[0].sums[index];
  const std::size_t half = std::bit_ceil(records.size()) / 2;
  return tree_sum(records.first(half), index) + tree_sum(records.subspan(half), index);
}

}  // namespace

const char* to_string(Operation operation) noexcept {
  switch (operation) {
    case Operation::all_reduce:
      return "all_reduce";
    case Operation::broadcast:
      return "broadcast";
    case Operation::all_gather:
      return "all_gather";
    case Operation::reduce_scatter:
      return "reduce_scatter";
    case Operation::all_to_all:
      return "all_to_all";
    case Operation::barrier:
      return "barrier";
    case Operation::allocate:
      return "allocate";
  }
  return "unknown operation";
}

std::string describe(const CallHeader& h) {
  std::string out = std::string(to_string(h.operation)) + "(";
  if (h.operation == Operation::allocate) {
    out += std::to_string(h.count) + " bytes";
  } else if (h.operation != Operation::barrier) {
    if (reduces(h.operation)) out += std::string(to_string(h.op)) + ", ";
    out += std::to_string(h.count) + " x " + std::string(to_string(h.dtype));
    if (h.operation == Operation::broadcast) out += ", root " + std::to_string(h.root);
    if (h.divide_by_sum >= 0) out += ", divided by sum " + std::to_string(h.divide_by_sum);
  }
  if (h.device != Device::Kind::cpu) out += ", on a GPU";
  if (h.may_round != 0) out += ", may round";
  if (h.priority != 0) out += ", priority " + std::to_string(h.priority);
  if (h.what[0] != 0) out += std::string(", ") + h.what.data();
  if (h.step >= 0) out += ", step " + std::to_string(h.step);
  if (h.bucket >= 0) out += ", bucket " + std::to_string(h.bucket);
  if (h.words + h.sums > 0)
    out += ", control of " + std::to_string(h.words) + " words and " + std::to_string(h.sums) + " sums";
  return out + ") as call " + std::to_string(h.sequence);
}

std::vector<std::uint64_t> pack(const ControlRecord& record) {
  std::vector<std::uint64_t> out = record.words;
  for (const double sum : record.sums) out.push_back(std::bit_cast<std::uint64_t>(sum));
  return out;
}

ControlRecord unpack(const std::uint64_t* data, std::size_t words, std::size_t sums) {
  ControlRecord out;
  out.words.assign(data, data + words);
  for (std::size_t i = 0; i < sums; ++i) out.sums.push_back(std::bit_cast<double>(data[words + i]));
  return out;
}

ControlRecord combine(const std::vector<ControlRecord>& records) {
  ControlRecord out = records[0];
  for (const auto& record : records)
    for (std::size_t i = 0; i < out.words.size(); ++i) out.words[i] |= record.words[i];
  for (std::size_t i = 0; i < out.sums.size(); ++i) out.sums[i] = tree_sum(records, i);
  return out;
}

std::optional<std::string> find_difference(const std::vector<CallHeader>& headers, const std::string& group) {
  for (std::size_t rank = 1; rank < headers.size(); ++rank) {
    if (same_call(headers[0], headers[rank])) continue;
    return "unisono " + group + " group of " + std::to_string(headers.size()) + ": ranks disagree: rank 0 calls " +
           describe(headers[0]) + ", rank " + std::to_string(rank) + " calls " + describe(headers[rank]) +
           ". All ranks must make the same calls in the same order. No data was touched; the group is unusable now, "
           "make a new one.";
  }
  return std::nullopt;
}

}  // namespace unisono
