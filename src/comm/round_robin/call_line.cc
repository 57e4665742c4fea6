#include "comm/round_robin/call_line.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace unisono {
namespace {

constexpr auto kAll = std::numeric_limits<std::int64_t>::max();

Error error_in(const std::exception_ptr& raised) {
  try {
    std::rethrow_exception(raised);
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& other) {
    return Error(ErrorCode::internal, other.what());
  }
}

class LineWork final : public WorkState {
 public:
  LineWork(std::shared_ptr<CallLine> line, TurnCall call) : line_(std::move(line)), call_(std::move(call)) {}

  bool poll() override { return ended() || (call_.work.poll() && end(false)); }

  void wait() override {
    if (ended()) return;
    try {
      call_.work.wait();
    } catch (...) {  // its error is read below
    }
    end(true);
  }

  std::exception_ptr error() const override {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  const ControlRecord& control() const override { return call_.work.control(); }
  bool withheld() const override { return call_.work.withheld(); }
  std::vector<std::int64_t> arrivals() const override { return call_.work.arrivals(); }

 private:
  bool ended() const {
    const std::lock_guard lock(mutex_);
    return ended_;
  }

  // The call has ended in its group.
  bool end(bool wait) {
    const auto error = call_.work.error();
    if (error) {
      line_->fail(call_, error_in(error));
    } else if (call_.in_order && !line_->passed(call_, wait)) {
      return false;
    }
    const auto outcome = line_->outcome(call_);
    const std::lock_guard lock(mutex_);
    if (!ended_) error_ = outcome;
    return ended_ = true;
  }

  std::shared_ptr<CallLine> line_;
  TurnCall call_;
  mutable std::mutex mutex_;
  bool ended_ = false;
  std::exception_ptr error_;
};

}  // namespace

CallLine::CallLine(const std::vector<std::shared_ptr<ProcessGroup>>& groups) : groups_(groups.begin(), groups.end()) {
  for (const auto& group : groups) names_.push_back(group->name());
}

std::string CallLine::place(std::size_t group) const {
  return "round robin, group " + std::to_string(group) + " of " + std::to_string(names_.size()) + " (" + names_[group] +
         "): ";
}

Work CallLine::add(TurnCall call) {
  {
    const std::lock_guard lock(mutex_);
    next_ = call.number + 1;
    line_.push_back(call);
  }
  return Work(std::make_shared<LineWork>(shared_from_this(), std::move(call)));
}

std::optional<TurnCall> CallLine::first(std::int64_t before) {
  const std::lock_guard lock(mutex_);
  if (line_.empty() || line_.front().number >= before) return std::nullopt;
  return line_.front();
}

void CallLine::forget(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  if (!line_.empty() && line_.front().number == number) line_.pop_front();
}

bool CallLine::passed(const TurnCall& call, bool wait) {
  while (auto earlier = first(call.number)) {
    if (wait) {
      try {
        earlier->work.wait();
      } catch (...) {  // read below
      }
    } else if (!earlier->work.poll()) {
      return false;
    }
    if (const auto error = earlier->work.error()) note(*earlier, error_in(error));
    forget(earlier->number);
  }
  return true;
}

void CallLine::check() {
  passed({.number = kAll}, false);
  const std::lock_guard lock(mutex_);
  if (cause_) throw Error(*cause_);
}

void CallLine::fail(const TurnCall& call, const Error& error) {
  passed(call, false);
  note(call, error);
}

void CallLine::note(const TurnCall& call, const Error& error) {
  const std::string text = error.what();
  const bool named = text.find("round robin, group ") != std::string::npos;  // by the rank that aborted this one
  const Error cause(error.code(), named ? text : place(call.group) + text);
  {
    const std::lock_guard lock(mutex_);
    if (cause_) return;
    cause_ = cause;
    failed_ = call.number;
  }
  for (const auto& group : groups_) {
    if (const auto living = group.lock()) living->abort(cause);
  }
}

void CallLine::fail(const Error& cause) {
  {
    const std::lock_guard lock(mutex_);
    if (cause_) return;
    cause_ = cause;
    failed_ = next_;
  }
  for (const auto& group : groups_) {
    if (const auto living = group.lock()) living->abort(cause);
  }
}

std::exception_ptr CallLine::outcome(const TurnCall& call) {
  const bool failed = call.work.error() != nullptr;
  const std::lock_guard lock(mutex_);
  return cause_ && (failed || call.number > failed_) ? std::make_exception_ptr(*cause_) : nullptr;
}

}  // namespace unisono
