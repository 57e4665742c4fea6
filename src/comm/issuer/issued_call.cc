#include "comm/issuer/issued_call.h"

#include <algorithm>
#include <utility>

#include "comm/issuer/short_call.h"

namespace unisono {

std::chrono::milliseconds IssuedCall::left() const {
  const auto rest = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return std::max(rest, std::chrono::milliseconds(1));
}

std::size_t IssuedCall::contribution_size() const {
  return contribution_bytes(header.operation, header.count, header.dtype);
}

void IssuedCall::end(const Error* error, bool withheld, StreamFence outputs_ready) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  if (error) error_.emplace(error->code(), std::string(error->what()));
  withheld_ = withheld;
  outputs_ready_ = std::move(outputs_ready);
  ended_ = true;
  ended_changed_.notify_all();
}

void IssuedCall::succeed(bool withheld, StreamFence outputs_ready) { end(nullptr, withheld, std::move(outputs_ready)); }

void IssuedCall::fail(const Error& error) { end(&error, false, {}); }

bool IssuedCall::poll() {
  const std::lock_guard lock(mutex_);
  if (ended_ && outputs_ready_) outputs_ready_();
  return ended_;
}

// The group's thread ends every call by its deadline, so this wait needs none of its own.
void IssuedCall::wait() {
  std::unique_lock lock(mutex_);
  ended_changed_.wait(lock, [this] { return ended_; });
  if (outputs_ready_) outputs_ready_();
}

std::exception_ptr IssuedCall::error() const {
  const std::lock_guard lock(mutex_);
  return error_ ? std::make_exception_ptr(Error(error_->code(), std::string(error_->what()))) : nullptr;
}

bool IssuedCall::withheld() const {
  const std::lock_guard lock(mutex_);
  return withheld_;
}

}  // namespace unisono
