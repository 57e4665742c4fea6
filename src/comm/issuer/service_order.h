#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <tuple>

namespace unisono {

/// Which of the calls with a priority moves its data next. A pure state machine, fed with what all ranks learn in the
/// same order, so that all ranks get the same answers although they are never at the same point.
///
/// At most `kMoving` calls move at once; of those that wait, the one with the highest priority goes next, older ones
/// first among equals. Whether one has ended is known to all only by being told: every exchange of headers carries how
/// many calls have ended on the rank that sends it, and what counts is the least over ranks. When calls wait and no
/// header is due, `wants_word` asks for an exchange that carries nothing else. It looks only at what all ranks know and
/// at this rank's own end of calls that all ranks have started, so that every rank comes to it sooner or later.
class ServiceOrder {
 public:
  /// Some must move while the ranks agree on the next, or the link falls idle: the agreement queues behind their data.
  static constexpr std::int64_t kMoving = 2;

  /// All ranks have made call `sequence`.
  void add(std::int64_t sequence, std::int32_t priority) { waiting_.insert({-priority, sequence}); }
  /// An exchange said that every rank has ended at least `ended` calls.
  void learn(std::int64_t ended) { agreed_ = ended; }
  /// A call that `next` gave has ended on this rank.
  void ended_here() { ++ended_; }
  std::int64_t ended() const { return ended_; }

  bool waiting() const { return !waiting_.empty(); }
  /// Whether this rank should enter an exchange although it has no call to make.
  bool wants_word() const { return waiting() && ended_ > agreed_; }
  /// The call whose data moves now, if one may.
  std::optional<std::int64_t> next();

 private:
  std::set<std::tuple<std::int32_t, std::int64_t>> waiting_;
  std::int64_t started_ = 0;
  std::int64_t ended_ = 0;   // on this rank
  std::int64_t agreed_ = 0;  // on all ranks, as far as they have said
};

}  // namespace unisono
