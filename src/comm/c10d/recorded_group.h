#pragma once

#include <unisono/process_group.h>

#include <memory>
#include <mutex>
#include <vector>

namespace unisono {

/// A group that remembers which calls were made through it, and can make them once more with nothing in them: how a
/// rank without inputs takes part in collectives that the other ranks' forwards and backwards make. For messages in
/// which zeros mean "no data". *Threads*: as the group inside.
class RecordedGroup final : public ProcessGroup {
 public:
  explicit RecordedGroup(std::shared_ptr<ProcessGroup> inner);

  /// The calls since the last mark are one whole round (`whole`) or none worth remembering; a new one begins.
  void mark(bool whole);
  /// Ends the round that has begun as the last whole one did, or makes a whole one, with zeros. *Collective*. *Blocks*.
  void replay();

  Work all_reduce(Buffer data, const AllReduceOptions& options) override;
  Work broadcast(Buffer data, int root, const CallOptions& options) override;
  Work all_gather(Buffer out, Buffer in, const CallOptions& options) override;
  Work reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options) override;
  Work all_to_all(Buffer out, Buffer in, const CallOptions& options) override;
  Work barrier(const CallOptions& options) override;
  Buffer allocate(std::size_t bytes) override { return inner_->allocate(bytes); }
  void abort(const Error& cause) override { inner_->abort(cause); }

 private:
  enum class Kind { all_reduce, all_gather };
  struct Call {
    Kind kind;
    std::size_t count;
    Dtype dtype;
    AllReduceOptions options;
  };
  void note(Call call);

  std::shared_ptr<ProcessGroup> inner_;
  mutable std::mutex mutex_;
  std::vector<Call> round_;  // the last whole one
  std::vector<Call> begun_;  // since the last mark
};

/// The companion of `group` (see companion.h) if it has one already; null otherwise.
std::shared_ptr<RecordedGroup> recorded_companion(const std::shared_ptr<ProcessGroup>& group);

}  // namespace unisono
