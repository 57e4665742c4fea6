#include "comm/serial/serial_group.h"

#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "comm/anonymous_memory.h"
#include "comm/arguments.h"
#include "comm/reduce_kernels.h"

namespace unisono {
namespace {

/// A call that ended when it was made.
class EndedWork final : public WorkState {
 public:
  explicit EndedWork(const CallOptions& options)
      : control_(options.control), withheld_(options.withhold), entered_(now_ns()) {}

  bool poll() override { return true; }
  void wait() override {}
  std::exception_ptr error() const override { return nullptr; }
  const ControlRecord& control() const override { return control_; }
  bool withheld() const override { return withheld_; }
  std::vector<std::int64_t> arrivals() const override { return {entered_}; }

 private:
  ControlRecord control_;
  bool withheld_;
  std::int64_t entered_;
};

class SerialGroup final : public ProcessGroup {
 public:
  explicit SerialGroup(std::chrono::nanoseconds timeout) : ProcessGroup(0, 1, "serial", timeout) {}

  Work all_reduce(Buffer data, const AllReduceOptions& options) override {
    throw_if_poisoned();
    check_all_reduce(*this, data, options);
    if (!options.withhold) reduce(data, data, options);
    return ended(options);
  }

  Work broadcast(Buffer data, int root, const CallOptions& options) override {
    throw_if_poisoned();
    check_broadcast(*this, data, root, options);
    return ended(options);
  }

  Work all_gather(Buffer out, Buffer in, const CallOptions& options) override {
    throw_if_poisoned();
    check_all_gather(*this, out, in, options);
    if (!options.withhold) copy(out, in);
    return ended(options);
  }

  Work reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options) override {
    throw_if_poisoned();
    check_reduce_scatter(*this, out, in, options);
    if (!options.withhold) reduce(out, in, options);
    return ended(options);
  }

  Work all_to_all(Buffer out, Buffer in, const CallOptions& options) override {
    throw_if_poisoned();
    check_all_to_all(*this, out, in, options);
    if (!options.withhold) copy(out, in);
    return ended(options);
  }

  Work barrier(const CallOptions& options) override {
    throw_if_poisoned();
    check_barrier(*this, options);
    return ended(options);
  }

  Buffer allocate(std::size_t bytes) override {
    throw_if_poisoned();
    auto memory = anonymous_memory(bytes);
    if (!memory) {
      throw Error(ErrorCode::invalid_argument, describe_call(*this, "allocate", -1) + ": " + std::to_string(bytes) +
                                                   " bytes do not fit; this machine has " +
                                                   std::to_string(memory_of_machine()) +
                                                   " bytes of memory and swap in all, some of it in use");
    }
    return {.data = memory.get(), .count = bytes, .dtype = Dtype::u8, .owner = memory};
  }

  void abort(const Error& cause) override {
    std::lock_guard lock(mutex_);
    if (!poison_) poison_.emplace(cause);
  }

 private:
  void throw_if_poisoned() {
    std::lock_guard lock(mutex_);
    if (poison_) throw Error(*poison_);
  }

  static Work ended(const CallOptions& options) { return Work(std::make_shared<EndedWork>(options)); }

  static void copy(const Buffer& out, const Buffer& in) {
    if (out.data != in.data && in.count > 0) std::memmove(out.data, in.data, in.bytes());
  }

  static void reduce(const Buffer& out, const Buffer& in, const AllReduceOptions& options) {
    double divisor = 1;
    if (options.divide_by_sum >= 0) divisor = options.control.sums[static_cast<std::size_t>(options.divide_by_sum)];
    if (divisor == 1) return copy(out, in);
    const void* inputs[] = {in.data};
    void* outputs[] = {out.data};
    tree_reduce(inputs, outputs, in.count, in.dtype, ReduceOp::sum, divisor);
  }

  std::mutex mutex_;
  std::optional<Error> poison_;
};

}  // namespace

std::shared_ptr<ProcessGroup> make_serial_group(const GroupOptions& options) {
  if (options.rank != 0 || options.size != 1) {
    throw Error(ErrorCode::invalid_argument, "unisono serial group: rank is " + std::to_string(options.rank) + " of " +
                                                 std::to_string(options.size) +
                                                 "; a serial group is rank 0 of 1. Use transport shm or auto for more");
  }
  return std::make_shared<SerialGroup>(options.timeout);
}

}  // namespace unisono
