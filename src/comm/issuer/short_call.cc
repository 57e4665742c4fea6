#include "comm/issuer/short_call.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "comm/reduce_kernels.h"

namespace unisono {
namespace {

constexpr std::size_t kShort = 64 << 10;

}  // namespace

std::size_t contribution_bytes(Operation operation, std::uint64_t count, Dtype dtype) {
  const bool gathers =
      operation == Operation::all_reduce || operation == Operation::broadcast || operation == Operation::all_gather;
  return gathers ? static_cast<std::size_t>(count) * size_of(dtype) : 0;
}

const void* contribution(const DataCall& call) {
  return call.operation == Operation::all_gather ? call.in.data : call.out.data;
}

bool ShortCalls::is_short(const DataCall& call) const {
  if (call.out.device.kind != Device::Kind::cpu) return false;
  const std::size_t count = call.operation == Operation::all_gather ? call.in.count : call.out.count;
  const std::size_t bytes = contribution_bytes(call.operation, count, call.out.dtype);
  return bytes > 0 && bytes <= kShort / ranks_;
}

std::size_t ShortCalls::room() const {
  return std::min(*std::max_element(lately_.begin(), lately_.end()), kShort / ranks_);
}

void ShortCalls::learn(std::size_t bytes) {
  lately_[next_] = bytes;
  next_ = (next_ + 1) % lately_.size();
}

void finish_short(const DataCall& call, const std::vector<const void*>& given, double divisor) {
  if (call.operation == Operation::all_reduce) {
    const ReduceOp op = call.op == ReduceOp::avg ? ReduceOp::sum : call.op;
    return tree_reduce(given, std::span<void* const>(&call.out.data, 1), call.out.count, call.out.dtype, op, divisor);
  }
  if (call.operation == Operation::broadcast) {
    std::memmove(call.out.data, given[static_cast<std::size_t>(call.root)], call.out.bytes());
    return;
  }
  auto* to = static_cast<std::byte*>(call.out.data);
  for (const void* block : given) {
    std::memcpy(to, block, call.in.bytes());
    to += call.in.bytes();
  }
}

}  // namespace unisono
