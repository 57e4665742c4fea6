#include "comm/c10d/c10d_call.h"

#include <utility>

namespace unisono {

void C10dCall::end(std::exception_ptr error, bool withheld, StreamFence outputs_ready) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  error_ = std::move(error);
  withheld_ = withheld;
  outputs_ready_ = std::move(outputs_ready);
  ended_ = true;
  ended_changed_.notify_all();
}

void C10dCall::succeed(bool withheld, StreamFence outputs_ready) { end(nullptr, withheld, std::move(outputs_ready)); }

void C10dCall::fail(const Error& error) { end(std::make_exception_ptr(error), false, {}); }

bool C10dCall::poll() {
  const std::lock_guard lock(mutex_);
  if (ended_) outputs_ready_.make_current_stream_wait();
  return ended_;
}

// The group's thread ends every call by its deadline, so this wait needs none of its own.
void C10dCall::wait() {
  std::unique_lock lock(mutex_);
  ended_changed_.wait(lock, [this] { return ended_; });
  outputs_ready_.make_current_stream_wait();
}

std::exception_ptr C10dCall::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool C10dCall::withheld() const {
  const std::lock_guard lock(mutex_);
  return withheld_;
}

}  // namespace unisono
