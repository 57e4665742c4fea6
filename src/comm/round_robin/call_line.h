#pragma once

#include <unisono/process_group.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace unisono {

/// A call that one of the groups has under way.
struct TurnCall {
  Work work;
  std::size_t group = 0;
  std::int64_t number = 0;
  bool in_order = true;  ///< ends when those before it have ended
};

/// The calls of a round robin in the order in which they were made, and the first cause of its failure.
///
/// Nobody watches the groups: a failure is seen when somebody makes, polls or waits for a call, which looks at those
/// before it first. Then the other groups are aborted with the cause, so that the other ranks see it too, whichever
/// group they wait for. *Threads*: any.
class CallLine : public std::enable_shared_from_this<CallLine> {
 public:
  explicit CallLine(const std::vector<std::shared_ptr<ProcessGroup>>& groups);

  /// The call as its caller sees it.
  Work add(TurnCall call);
  /// Forgets calls that have ended. *Throws* the cause when the group is poisoned.
  void check();
  /// `call` has failed with `error`: the cause from now on, unless a call before it has failed or there is one already.
  void fail(const TurnCall& call, const Error& error);
  /// The same for a failure of no call; every later one fails.
  void fail(const Error& cause);

  /// Whether those before `call` have ended, waited for if `wait`.
  bool passed(const TurnCall& call, bool wait);
  /// What `call`, which has ended in its group, ends with; null when well.
  std::exception_ptr outcome(const TurnCall& call);

 private:
  std::optional<TurnCall> first(std::int64_t before);
  void forget(std::int64_t number);
  void note(const TurnCall& call, const Error& error);
  std::string place(std::size_t group) const;

  std::vector<std::weak_ptr<ProcessGroup>> groups_;  // calls may outlive them
  std::vector<std::string> names_;
  std::mutex mutex_;
  std::deque<TurnCall> line_;  // not known to have ended
  std::optional<Error> cause_;
  std::int64_t failed_ = 0;  // number of the call that failed
  std::int64_t next_ = 0;
};

}  // namespace unisono
