#include "comm/shm/mail.h"

#include <utility>

#include "base/clock.h"
#include "comm/shm/mailbox.h"

namespace unisono::shm {

Mail::Mail(std::shared_ptr<Mailbox> mailbox, Direction direction, Buffer data, int peer, std::int64_t tag,
           std::chrono::nanoseconds timeout)
    : mailbox_(std::move(mailbox)),
      direction_(direction),
      data_(std::move(data)),
      asked_(peer),
      peer_(peer),
      tag_(tag),
      issued_ns_(now_ns()) {
  deadline_ns_ = issued_ns_ + bounded(timeout).count();
}

bool Mail::poll() {
  if (!has_ended()) mailbox_->poll();
  return has_ended();
}

void Mail::wait() {
  if (!has_ended()) mailbox_->wait(*this);
}

}  // namespace unisono::shm
