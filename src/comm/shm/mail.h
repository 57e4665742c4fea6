#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>

#include "comm/point_to_point.h"

namespace unisono::shm {

class Mailbox;

/// One message as its sender or receiver sees it. Everything but `ended_` belongs to the mailbox until it has ended.
class Mail final : public Message {
 public:
  enum class Direction : std::uint8_t { send, receive };

  Mail(std::shared_ptr<Mailbox> mailbox, Direction direction, Buffer data, int peer, std::int64_t tag,
       std::chrono::nanoseconds timeout);

  bool poll() override;
  void wait() override;
  std::exception_ptr error() const override { return has_ended() ? error_ : nullptr; }
  const ControlRecord& control() const override { return none_; }
  bool withheld() const override { return false; }
  int peer() const override { return has_ended() || direction_ == Direction::send ? peer_ : asked_; }
  bool has_ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  friend class Mailbox;
  std::byte* bytes() const { return static_cast<std::byte*>(data_.data); }

  std::shared_ptr<Mailbox> mailbox_;
  const Direction direction_;
  Buffer data_;
  const int asked_;  ///< the peer that was asked for, or kAnyRank
  int peer_;
  const std::int64_t tag_;
  std::int64_t issued_ns_ = 0;
  std::int64_t deadline_ns_ = 0;
  bool begun_ = false;       ///< of a send: its header is in the lane
  std::uint64_t moved_ = 0;  ///< of a send
  std::exception_ptr error_;
  std::atomic<bool> ended_{false};
  ControlRecord none_;
};

}  // namespace unisono::shm
