#pragma once

#include <unisono/buffer.h>
#include <unisono/work.h>

#include <chrono>
#include <cstdint>
#include <memory>

namespace unisono {

/// A message on its way. `control` is empty, `withheld` false.
class Message : public WorkState {
 public:
  /// The rank it came from, or goes to; of a receive from any rank, -1 until it has ended.
  virtual int peer() const = 0;
};

/// Messages between two ranks, beside the collectives of their group. Only transports that can do better than a
/// collective of two have them; ask with `dynamic_cast`.
///
/// *Order*: messages from one rank to another with one tag arrive in the order they were sent; tags may be received in
/// any order. Neither has a place in the order of the collectives.
///
/// *Failure*: as in the group's contract: lost peers, passed deadlines and messages of another size or dtype than the
/// receiver expects are errors that name both, and poison the group.
class PointToPoint {
 public:
  static constexpr int kAnyRank = -1;

  virtual ~PointToPoint() = default;
  /// Ends when `data` may be changed again, which may be before anybody receives it.
  virtual std::shared_ptr<Message> send(Buffer data, int to, std::int64_t tag, std::chrono::nanoseconds timeout) = 0;
  /// Ends when `data` holds the next message with this tag from rank `from`, or `kAnyRank`.
  virtual std::shared_ptr<Message> receive(Buffer data, int from, std::int64_t tag,
                                           std::chrono::nanoseconds timeout) = 0;
};

}  // namespace unisono
