#include "comm/arguments.h"

#include <cstring>

namespace unisono {
namespace {

struct Checker {
  const ProcessGroup& group;
  std::string_view operation;
  const CallOptions& options;

  [[noreturn]] void fail(const std::string& problem) const {
    throw Error(ErrorCode::invalid_argument, describe_call(group, operation, -1, options.tag) + ": " + problem);
  }

  void common() const {
    if (options.priority < 0) fail("the priority is " + std::to_string(options.priority) + "; use 0 for none");
    if (options.timeout.count() < 0) fail("the timeout is negative; use 0 for the group's own");
  }

  void buffer(const Buffer& b, const char* name, Device::Kind device) const {
    if (size_of(b.dtype) == 0) fail(std::string(name) + " has an unknown dtype");
    if (b.count > 0 && b.data == nullptr) {
      fail(std::string(name) + " has " + std::to_string(b.count) + " elements and a null data pointer");
    }
    if (b.device.kind != device) {
      const char* there = b.device.kind == Device::Kind::cpu ? "the CPU" : "a CUDA device";
      const char* here = device == Device::Kind::cpu ? "the CPU" : "a CUDA device";
      fail(std::string(name) + " lies on " + there + "; this group serves memory on " + here);
    }
  }

  void pair(const Buffer& large, const char* large_name, const Buffer& small, const char* small_name) const {
    const auto size = static_cast<std::size_t>(group.size());
    if (large.dtype != small.dtype) {
      fail(std::string(large_name) + " is " + std::string(to_string(large.dtype)) + " and " + small_name + " is " +
           std::string(to_string(small.dtype)) + "; both must have one dtype");
    }
    if (large.count != small.count * size) {
      fail(std::string(large_name) + " has " + std::to_string(large.count) + " elements; with " + small_name + " of " +
           std::to_string(small.count) + " and " + std::to_string(size) + " ranks it needs " +
           std::to_string(small.count * size));
    }
  }

  void reduction(Dtype dtype, const AllReduceOptions& o) const {
    if (!is_defined(o.op, dtype)) {
      fail(std::string(to_string(o.op)) + " is not defined for " + std::string(to_string(dtype)));
    }
    if (o.divide_by_sum < 0) return;
    const std::string index = "divide_by_sum is " + std::to_string(o.divide_by_sum);
    if (o.op != ReduceOp::sum || !is_defined(ReduceOp::avg, dtype)) {
      fail(index + "; it needs op sum and a floating dtype, not " + std::string(to_string(o.op)) + " of " +
           std::string(to_string(dtype)));
    }
    if (static_cast<std::size_t>(o.divide_by_sum) >= o.control.sums.size()) {
      fail(index + " and the control record has " + std::to_string(o.control.sums.size()) + " sums");
    }
  }
};

}  // namespace

std::string describe_call(const ProcessGroup& group, std::string_view operation, std::int64_t sequence,
                          const CallTag& tag) {
  return describe_call(Member{group.name(), group.rank(), group.size()}, operation, sequence, tag);
}

std::string describe_call(const Member& member, std::string_view operation, std::int64_t sequence, const CallTag& tag) {
  std::string text = "unisono " + member.name + " group, rank " + std::to_string(member.rank) + " of " +
                     std::to_string(member.size) + ", " + std::string(operation);
  if (sequence >= 0) text += " " + std::to_string(sequence);
  std::string what;
  const auto add = [&what](const std::string& part) { what += (what.empty() ? "" : ", ") + part; };
  if (tag.step >= 0) add("step " + std::to_string(tag.step));
  if (tag.bucket >= 0) add("bucket " + std::to_string(tag.bucket));
  if (tag.what != nullptr && *tag.what != '\0') add(tag.what);
  return what.empty() ? text : text + " (" + what + ")";
}

void check_not_forked(const ProcessGroup& group, const ForkMark& mark) {
  if (!mark.forked()) return;
  throw Error(ErrorCode::invalid_argument,
              "unisono " + group.name() + " group: a call in a process that was forked from rank " +
                  std::to_string(group.rank()) +
                  "'s. A fork is no rank; let the rank itself make the call, or start the process by spawn");
}

void check_all_reduce(const ProcessGroup& group, const Buffer& data, const AllReduceOptions& options,
                      Device::Kind device) {
  const Checker check{group, "all_reduce", options};
  check.common();
  check.buffer(data, "data", device);
  check.reduction(data.dtype, options);
}

void check_broadcast(const ProcessGroup& group, const Buffer& data, int root, const CallOptions& options,
                     Device::Kind device) {
  const Checker check{group, "broadcast", options};
  check.common();
  check.buffer(data, "data", device);
  if (root < 0 || root >= group.size()) {
    check.fail("root is " + std::to_string(root) + "; it must be 0 to " + std::to_string(group.size() - 1));
  }
}

void check_all_gather(const ProcessGroup& group, const Buffer& out, const Buffer& in, const CallOptions& options,
                      Device::Kind device) {
  const Checker check{group, "all_gather", options};
  check.common();
  check.buffer(out, "out", device);
  check.buffer(in, "in", device);
  check.pair(out, "out", in, "in");
}

void check_reduce_scatter(const ProcessGroup& group, const Buffer& out, const Buffer& in,
                          const AllReduceOptions& options, Device::Kind device) {
  const Checker check{group, "reduce_scatter", options};
  check.common();
  check.buffer(out, "out", device);
  check.buffer(in, "in", device);
  check.pair(in, "in", out, "out");
  check.reduction(in.dtype, options);
}

void check_all_to_all(const ProcessGroup& group, const Buffer& out, const Buffer& in, const CallOptions& options,
                      Device::Kind device) {
  const Checker check{group, "all_to_all", options};
  check.common();
  check.buffer(out, "out", device);
  check.buffer(in, "in", device);
  if (in.dtype != out.dtype || in.count != out.count) {
    check.fail("in is " + std::to_string(in.count) + " " + std::string(to_string(in.dtype)) + " and out is " +
               std::to_string(out.count) + " " + std::string(to_string(out.dtype)) + "; they must be the same");
  }
  if (in.count % static_cast<std::size_t>(group.size()) != 0) {
    check.fail("in has " + std::to_string(in.count) + " elements, which " + std::to_string(group.size()) +
               " ranks cannot share equally");
  }
}

void check_message(const ProcessGroup& group, std::string_view operation, const Buffer& data, int peer, bool any,
                   std::chrono::nanoseconds timeout, Device::Kind device) {
  CallOptions options;
  options.timeout = timeout;
  const Checker check{group, operation, options};
  check.common();
  check.buffer(data, "data", device);
  if (peer < 0 && any) return;
  if (peer < 0 || peer >= group.size()) {
    check.fail("the other side is rank " + std::to_string(peer) + "; it must be 0 to " +
               std::to_string(group.size() - 1));
  }
  if (peer == group.rank()) check.fail("the other side is this rank; messages go between two ranks");
}

void check_barrier(const ProcessGroup& group, const CallOptions& options) {
  Checker{group, "barrier", options}.common();
}

}  // namespace unisono
