#include "comm/c10d/recorded_group.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace unisono {

RecordedGroup::RecordedGroup(std::shared_ptr<ProcessGroup> inner)
    : ProcessGroup(inner->rank(), inner->size(), inner->name(), inner->timeout()), inner_(std::move(inner)) {}

void RecordedGroup::mark(bool whole) {
  const std::lock_guard lock(mutex_);
  if (whole && !begun_.empty()) std::swap(round_, begun_);
  begun_.clear();
}

void RecordedGroup::replay() {
  std::vector<Call> calls;
  {
    const std::lock_guard lock(mutex_);
    if (round_.empty())
      round_ = begun_;  // ended in its first round: whatever it held so far is all that is known of one
    const std::size_t done = std::min(begun_.size(), round_.size());
    calls.assign(round_.begin() + static_cast<std::ptrdiff_t>(done), round_.end());
    begun_.clear();
  }
  for (const Call& call : calls) {
    std::vector<std::byte> in(call.count * size_of(call.dtype));
    if (call.kind == Kind::all_reduce) {
      inner_->all_reduce({in.data(), call.count, call.dtype}, call.options).wait();
      continue;
    }
    const auto world = static_cast<std::size_t>(size());
    std::vector<std::byte> out(in.size() * world);
    inner_->all_gather({out.data(), call.count * world, call.dtype}, {in.data(), call.count, call.dtype}, call.options)
        .wait();
  }
}

void RecordedGroup::note(Call call) {
  const std::lock_guard lock(mutex_);
  constexpr std::size_t kMost = 1 << 16;  // forwards that no synchronisation follows: nobody will ask for them
  if (begun_.size() == kMost) begun_.clear();
  begun_.push_back(std::move(call));
}

Work RecordedGroup::all_reduce(Buffer data, const AllReduceOptions& options) {
  note({Kind::all_reduce, data.count, data.dtype, options});
  return inner_->all_reduce(std::move(data), options);
}

Work RecordedGroup::all_gather(Buffer out, Buffer in, const CallOptions& options) {
  AllReduceOptions noted;
  static_cast<CallOptions&>(noted) = options;
  note({Kind::all_gather, in.count, in.dtype, noted});
  return inner_->all_gather(std::move(out), std::move(in), options);
}

Work RecordedGroup::broadcast(Buffer data, int root, const CallOptions& options) {
  return inner_->broadcast(std::move(data), root, options);
}

Work RecordedGroup::reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options) {
  return inner_->reduce_scatter(std::move(out), std::move(in), options);
}

Work RecordedGroup::all_to_all(Buffer out, Buffer in, const CallOptions& options) {
  return inner_->all_to_all(std::move(out), std::move(in), options);
}

Work RecordedGroup::barrier(const CallOptions& options) { return inner_->barrier(options); }

}  // namespace unisono
