#pragma once

#include <unisono/control_record.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

namespace unisono {

/// What a transport implements to stand behind a `Work`. Users see `Work`.
class WorkState {
 public:
  virtual ~WorkState() = default;
  /// Moves the call forward as far as it goes without waiting. Returns whether it has ended (well or not).
  virtual bool poll() = 0;
  /// Blocks until the call has ended or its deadline has passed; never throws for a failed call.
  virtual void wait() = 0;
  /// Null while running and after success.
  virtual std::exception_ptr error() const = 0;
  /// The combined record; valid once the call has ended well.
  virtual const ControlRecord& control() const = 0;
  /// Whether some rank withheld its data (`CallOptions::withhold`), so that no data moved; valid after the end.
  virtual bool withheld() const = 0;
  /// When each rank entered the call, nanoseconds of the host's monotonic clock; empty where it cannot be known.
  virtual std::vector<std::int64_t> arrivals() const { return {}; }
};

/// A collective in flight: a cheap, copyable handle. Dropping it neither waits nor cancels.
/// *Threads*: one handle may be used from any thread; calls on the same group may be waited for in any order.
class Work {
 public:
  Work() = default;  ///< an already ended call without data
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  /// Moves the call forward without waiting; whether it has ended. *Blocks*: never for a peer.
  bool poll() { return !state_ || state_->poll(); }
  /// *Blocks* until the call has ended, at most until its deadline. *Throws* `Error` when it failed.
  void wait() {
    if (!state_) return;
    state_->wait();
    if (auto e = state_->error()) std::rethrow_exception(e);
  }
  /// Null while it runs and after success.
  std::exception_ptr error() const { return state_ ? state_->error() : nullptr; }
  /// The control record combined over all ranks; only after a successful end.
  const ControlRecord& control() const {
    static const ControlRecord none;
    return state_ ? state_->control() : none;
  }
  /// Whether some rank withheld its data, so that no rank's data was touched; only after a successful end.
  bool withheld() const { return state_ && state_->withheld(); }
  /// Per rank, when it entered the call (ns, host monotonic clock); empty where unknown.
  std::vector<std::int64_t> arrivals() const { return state_ ? state_->arrivals() : std::vector<std::int64_t>{}; }

 private:
  std::shared_ptr<WorkState> state_;
};

}  // namespace unisono
