#include "comm/anonymous_memory.h"
#include "comm/arguments.h"
#include "comm/fake/fake_state.h"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;
using State = FakeWorld::State;

class FakeWork final : public WorkState {
 public:
  FakeWork(std::shared_ptr<State> state, std::int64_t sequence, int rank, std::chrono::nanoseconds timeout)
      : state_(std::move(state)), sequence_(sequence), rank_(rank), deadline_(Clock::now() + timeout) {}

  bool poll() override {
    std::lock_guard lock(state_->mutex);
    if (!round().ended && Clock::now() >= deadline_) state_->time_out(sequence_, rank_);
    return round().ended;
  }
  void wait() override {
    std::unique_lock lock(state_->mutex);
    if (state_->changed.wait_until(lock, deadline_, [this] { return round().ended; })) return;
    state_->time_out(sequence_, rank_);
  }
  std::exception_ptr error() const override {
    std::lock_guard lock(state_->mutex);
    return round().error;
  }
  const ControlRecord& control() const override {
    std::lock_guard lock(state_->mutex);
    return round().control;
  }
  bool withheld() const override {
    std::lock_guard lock(state_->mutex);
    return round().withheld;
  }
  std::vector<std::int64_t> arrivals() const override {
    std::lock_guard lock(state_->mutex);
    return round().arrivals;
  }

 private:
  FakeRound& round() const { return state_->round(sequence_); }

  std::shared_ptr<State> state_;
  std::int64_t sequence_;
  int rank_;
  Clock::time_point deadline_;
};

class FakeGroup final : public ProcessGroup {
 public:
  FakeGroup(std::shared_ptr<State> state, int rank)
      : ProcessGroup(rank, state->size, "fake", state->timeout), state_(std::move(state)) {}

  Work all_reduce(Buffer data, const AllReduceOptions& options) override {
    check([&] { check_all_reduce(*this, data, options); });
    FakeEntry entry = entry_of("all_reduce", data, data, options);
    entry.call.op = options.op;
    entry.call.divide_by_sum = options.divide_by_sum;
    return enter(std::move(entry), options);
  }
  Work broadcast(Buffer data, int root, const CallOptions& options) override {
    check([&] { check_broadcast(*this, data, root, options); });
    FakeEntry entry = entry_of("broadcast", data, data, options);
    entry.call.root = root;
    return enter(std::move(entry), options);
  }
  Work all_gather(Buffer out, Buffer in, const CallOptions& options) override {
    check([&] { check_all_gather(*this, out, in, options); });
    return enter(entry_of("all_gather", out, in, options), options);
  }
  Work reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options) override {
    check([&] { check_reduce_scatter(*this, out, in, options); });
    FakeEntry entry = entry_of("reduce_scatter", out, in, options);
    entry.call.op = options.op;
    entry.call.divide_by_sum = options.divide_by_sum;
    return enter(std::move(entry), options);
  }
  Work all_to_all(Buffer out, Buffer in, const CallOptions& options) override {
    check([&] { check_all_to_all(*this, out, in, options); });
    return enter(entry_of("all_to_all", out, in, options), options);
  }
  Work barrier(const CallOptions& options) override {
    check([&] { check_barrier(*this, options); });
    return enter(entry_of("barrier", {}, {}, options), options);
  }

  /// Does not wait for the others, so that one thread can drive all ranks; sizes are compared with who came first.
  Buffer allocate(std::size_t bytes) override {
    std::lock_guard lock(state_->mutex);
    state_->throw_if_poisoned();
    const std::size_t index = allocations_.size();
    if (index == state_->allocations.size()) state_->allocations.push_back(bytes);
    if (state_->allocations[index] != bytes) {
      state_->fail(Error(ErrorCode::mismatch, "unisono fake group, allocation " + std::to_string(index) + ": rank " +
                                                  std::to_string(rank()) + " wants " + std::to_string(bytes) +
                                                  " bytes, another rank " +
                                                  std::to_string(state_->allocations[index])));
      state_->throw_if_poisoned();
    }
    auto memory = anonymous_memory(bytes);
    allocations_.push_back({static_cast<unsigned char*>(memory.get()), memory ? bytes : 0});
    if (!memory) {
      throw Error(ErrorCode::invalid_argument, describe_call(*this, "allocate", -1) + ": " + std::to_string(bytes) +
                                                   " bytes do not fit; this machine has " +
                                                   std::to_string(memory_of_machine()) + " in all");
    }
    return {.data = memory.get(), .count = bytes, .dtype = Dtype::u8, .owner = memory};
  }

  void abort(const Error& cause) override {
    std::lock_guard lock(state_->mutex);
    if (!state_->poison) state_->fail(cause);
  }

 private:
  struct Allocation {
    unsigned char* begin;
    std::size_t bytes;
  };

  template <typename Check>
  void check(const Check& arguments) {
    {
      std::lock_guard lock(state_->mutex);
      state_->throw_if_poisoned();
    }
    arguments();
  }

  FakeEntry entry_of(const char* operation, const Buffer& out, const Buffer& in, const CallOptions& options) const {
    FakeEntry entry;
    entry.in = in;
    entry.out = out;
    FakeCall& call = entry.call;
    call.rank = rank();
    call.operation = operation;
    call.count = in.count;
    call.dtype = in.dtype;
    call.step = options.tag.step;
    call.bucket = options.tag.bucket;
    call.what = options.tag.what == nullptr ? "" : options.tag.what;
    call.control = options.control;
    call.withhold = options.withhold;
    return entry;
  }

  Work enter(FakeEntry entry, const CallOptions& options) {
    std::lock_guard lock(state_->mutex);
    state_->throw_if_poisoned();
    locate(entry);
    const std::int64_t sequence = state_->enter(std::move(entry));
    const auto timeout = options.timeout.count() > 0 ? options.timeout : this->timeout();
    return Work(std::make_shared<FakeWork>(state_, sequence, rank(), timeout));
  }

  /// The latest allocation wins: memory of one that was given back may have been mapped again.
  void locate(FakeEntry& entry) const {
    const auto* data = static_cast<unsigned char*>(entry.out.data);
    for (std::size_t i = 0; i < allocations_.size(); ++i) {
      const Allocation& a = allocations_[i];
      if (a.begin == nullptr || data < a.begin || data + entry.out.bytes() > a.begin + a.bytes) continue;
      entry.call.allocation = static_cast<int>(i);
      entry.call.offset = static_cast<std::size_t>(data - a.begin);
    }
  }

  std::shared_ptr<State> state_;
  std::vector<Allocation> allocations_;
};

}  // namespace

std::shared_ptr<ProcessGroup> make_fake_group(std::shared_ptr<State> state, int rank) {
  return std::make_shared<FakeGroup>(std::move(state), rank);
}

}  // namespace unisono
