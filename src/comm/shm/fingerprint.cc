#include "comm/shm/fingerprint.h"

#include <unisono/dtype.h>

#include <cstring>

namespace unisono::shm {
namespace {

const char* name_of(Operation operation) {
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
  return "unknown";
}

std::string counted(std::uint64_t n, const char* one, const char* many) {
  return std::to_string(n) + " " + (n == 1 ? one : many);
}

std::string tag_of(const Fingerprint& f) {
  const std::string what(f.what, strnlen(f.what, sizeof(f.what)));
  std::string text = what;
  if (f.step >= 0) text += (text.empty() ? "step " : " of step ") + std::to_string(f.step);
  if (f.bucket >= 0) text += (text.empty() ? "bucket " : ", bucket ") + std::to_string(f.bucket);
  return text;
}

}  // namespace

std::string describe(const Fingerprint& f) {
  std::string text;
  const auto add = [&text](const std::string& part) {
    if (!part.empty()) text += (text.empty() ? "" : ", ") + part;
  };
  const bool reduces = f.operation == Operation::all_reduce || f.operation == Operation::reduce_scatter;
  if (reduces) add(std::string(to_string(static_cast<ReduceOp>(f.reduce_op))));
  if (f.operation == Operation::allocate) {
    add(counted(f.count, "byte", "bytes"));
  } else if (f.operation != Operation::barrier) {
    add(std::string(to_string(static_cast<Dtype>(f.dtype))));
    add(counted(f.count, "element", "elements"));
  }
  if (f.operation == Operation::broadcast) add("root " + std::to_string(f.root));
  if (f.divide_by_sum >= 0) add("divided by sum " + std::to_string(f.divide_by_sum));
  if (f.words > 0 || f.sums > 0) {
    add("control of " + counted(f.words, "word", "words") + " and " + counted(f.sums, "sum", "sums"));
  }
  add(tag_of(f));
  return name_of(f.operation) + ("(" + text + ")");
}

std::optional<std::string> find_mismatch(const ControlSegment& segment, std::uint64_t sequence,
                                         const std::string& group) {
  const Fingerprint& first = segment.header(0, sequence).fingerprint;
  for (int r = 1; r < segment.size(); ++r) {
    const Fingerprint& other = segment.header(r, sequence).fingerprint;
    if (std::memcmp(&first, &other, sizeof(Fingerprint)) == 0) continue;
    return "mismatch in group " + group + ", call " + std::to_string(sequence) + ": rank 0 calls " + describe(first) +
           ", rank " + std::to_string(r) + " calls " + describe(other) +
           ". All ranks must make the same calls in the same order; the group can no longer be used.";
  }
  return std::nullopt;
}

}  // namespace unisono::shm
