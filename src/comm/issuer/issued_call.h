#pragma once

#include <unisono/work.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/issuer/engine.h"

namespace unisono {

/// A call on its way through the group's thread: headers, large control record, data, end. The upper part belongs to
/// that thread once the call is submitted; the lower part is what waiters see.
class IssuedCall final : public WorkState {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Phase { queued, agreed, held, data };

  // The group's thread.
  CallHeader header;
  DataCall data;
  ControlRecord record;
  CallTag tag;
  Clock::time_point deadline;
  std::chrono::nanoseconds timeout{0};
  StreamFence inputs_ready;
  Phase phase = Phase::queued;
  std::optional<EngineOp> op;  ///< the record or data under way
  std::vector<CallHeader> headers;
  std::shared_ptr<const std::vector<std::uint8_t>> received;  ///< of a short call: what `given` points into
  std::vector<const void*> given;                             ///< of a short call: all ranks' data, once it has come
  ControlRecord combined;
  std::shared_ptr<IssuedCall> whole;  ///< of a part: the call it is a part of
  std::size_t parts_left = 0;         ///< of a whole

  std::chrono::milliseconds left() const;  ///< until the deadline; at least one
  /// What each rank gives, if it is a short call.
  std::size_t contribution_size() const;
  void succeed(bool withheld, StreamFence outputs_ready);
  void fail(const Error& error);

  // Waiters.
  bool poll() override;
  void wait() override;
  std::exception_ptr error() const override;
  const ControlRecord& control() const override { return combined; }
  bool withheld() const override;

 private:
  void end(const Error* error, bool withheld, StreamFence outputs_ready);

  mutable std::mutex mutex_;
  std::condition_variable ended_changed_;
  bool ended_ = false;
  bool withheld_ = false;
  std::optional<Error> error_;  // every waiter is given an exception of its own
  StreamFence outputs_ready_;
};

}  // namespace unisono
