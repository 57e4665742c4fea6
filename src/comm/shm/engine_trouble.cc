#include <algorithm>

#include "base/clock.h"
#include "comm/shm/engine.h"
#include "comm/shm/event.h"
#include "comm/shm/fingerprint.h"

namespace unisono::shm {

// The other half of the engine: what happens when calls do not move.
//
// A call that not all ranks have entered is given up by withdrawing from its gate, and only if that succeeds: the gate
// decides. A call that all have entered is carried out whatever happens elsewhere. Its staged data may be left in the
// middle, since ranks then write staging memory only. In place, a rank leaves when a rank is dead or has failed, or
// when the deadline has passed; but it first maps private pages over its memory, because others may still be about to
// write there: this call's data, or that of the next call, if they looked at our done word before we failed. Within one
// process that would not keep a peer out; but there a peer cannot die or be stopped alone, so ranks that are threads
// wait for it.
//
// Order when giving up: the gate, the group's cause, the memory, and last the done word with its failed bit.

namespace {

constexpr std::int64_t kLookAtPeers = 50'000'000;    // ns between looks at whether peers live
constexpr std::int64_t kLookAtCalls = 1'000'000;     // ns between looks at all deadlines
constexpr std::int64_t kAbortGrace = 1'000'000'000;  // ns that peers get to be done in place after an abort

std::string milliseconds(std::int64_t ns) { return std::to_string(ns / 1'000'000) + " ms"; }

std::string list_ranks(std::uint64_t ranks) {
  std::string text;
  int count = 0;
  for (int r = 0; r < kMaxRanks; ++r) {
    if (!(ranks >> r & 1)) continue;
    text += (count++ ? ", " : "") + std::to_string(r);
  }
  return (count == 1 ? "rank " : "ranks ") + text;
}

}  // namespace

void Engine::throw_if_failed() {
  if (!failed_) {
    if (auto cause = read_cause(team_.segment.head().cause)) {
      failed_ = cause;
      failed_ns_ = now_ns();
      settle();
    }
  }
  if (failed_) throw Error(failed_->error);
}

void Engine::abort(const Error& cause) {
  publish_cause(team_.segment.head().cause, {cause, 0});
  wake_all(team_.segment.head().event);
}

// Called when nothing moved. Returns whether that changed anything.
bool Engine::look_for_trouble(std::int64_t now) {
  if (!failed_) {
    if (auto cause = read_cause(team_.segment.head().cause)) {
      failed_ = cause;
      failed_ns_ = now;
      settle();
      return true;
    }
  }
  if (now >= next_look_ns_) look_at_peers(now);
  if (!busy_ && look_at_head(*queue_.front(), now)) return true;
  if (now < next_scan_ns_) return false;
  next_scan_ns_ = now + kLookAtCalls;
  return look_at_deadlines(now);
}

void Engine::look_at_peers(std::int64_t now) {
  next_look_ns_ = now + kLookAtPeers;
  std::uint64_t gone = peers_.dead();
  for (int r = 0; r < team_.size; ++r) {
    if (r != team_.rank && team_.segment.words(r).left.load() != 0) gone |= 1ull << r;
  }
  gone_ = gone;
}

std::vector<int> Engine::lost() const {
  std::vector<int> ranks;
  for (int r = 0; r < team_.size; ++r) {
    if (r != team_.rank && (team_.segment.words(r).left.load() != 0 || !peers_.process(r).alive())) ranks.push_back(r);
  }
  return ranks;
}

bool Engine::look_at_head(Call& head, std::int64_t now) {
  if (head.stage_ == Stage::queued || head.stage_ == Stage::entered) {
    return gone_ != 0 && give_up(head, ErrorCode::peer_lost, lost_text(head));
  }
  std::uint64_t failed = 0;
  for (int r = 0; r < team_.size; ++r) {
    if (r != team_.rank && has_failed_by(team_.segment.words(r).done.load(), head.sequence_)) failed |= 1ull << r;
  }
  const std::uint64_t waited = waited_for(head);
  const std::uint64_t alive = waited & ~gone_ & ~failed;
  const bool lost = (waited & gone_) != 0;
  const bool late = now >= head.deadline_ns_;
  const bool aborted = failed_ && failed_->from <= head.sequence_;
  const bool hopeless = lost || failed != 0;
  const bool overdue = late || (aborted && now >= failed_ns_ + kAbortGrace);
  if (head.path_ == Path::in_place) {
    const bool stay = hopeless ? head.stage_ == Stage::finishing && peers_.any_here() : !overdue || peers_.any_here();
    if (alive != 0 ? stay : !hopeless) return false;
  } else if (!hopeless && !late && !aborted) {
    return false;
  }
  if (failed_) {
    fail_head(failed_->error);
  } else if (lost) {
    fail_head(Error(ErrorCode::peer_lost, lost_text(head)));
  } else if (failed != 0) {
    fail_head(Error(ErrorCode::peer_lost, place_of(head) + list_ranks(failed) + " gave it up"));
  } else {
    fail_head(Error(ErrorCode::timeout, place_of(head) + list_ranks(alive) +
                                            " entered it but did not finish it within " +
                                            milliseconds(now - head.issued_ns_) + "; stopped?"));
  }
  return true;
}

// The ranks without which `head`, which all have entered, cannot go on.
std::uint64_t Engine::waited_for(const Call& head) const {
  std::uint64_t ranks = 0;
  for (int r = 0; r < team_.size; ++r) {
    if (r == team_.rank) continue;
    const std::uint64_t done = team_.segment.words(r).done.load();
    bool waits = false;
    if (head.stage_ == Stage::finishing) {
      waits = !is_done(done, head.sequence_);
    } else if (head.rounds_) {
      waits = head.rounds_->waits_for(r);
    } else {
      waits = head.sequence_ > 0 && !is_done(done, head.sequence_ - 1);
    }
    if (waits) ranks |= 1ull << r;
  }
  return ranks;
}

bool Engine::look_at_deadlines(std::int64_t now) {
  for (const auto& call : queue_) {
    if (call->stage_ != Stage::queued && call->stage_ != Stage::entered) continue;
    if (now >= call->deadline_ns_ && give_up(*call, ErrorCode::timeout, absent_text(*call))) return true;
  }
  return false;
}

// Ends a call that not all ranks have entered, and with it the group. False when all have entered it after all.
bool Engine::give_up(Call& call, ErrorCode code, const std::string& text) {
  if (call.stage_ == Stage::entered) {
    const auto target = gate_target(call.sequence_, team_.size);
    if (withdraw(team_.segment.gate(call.sequence_), target) == GateState::full) return false;
  }
  fail(code, text, call.sequence_);
  return true;
}

void Engine::fail(ErrorCode code, const std::string& text, std::uint64_t from) {
  if (!failed_) {
    failed_ = publish_cause(team_.segment.head().cause, {Error(code, text), from});
    failed_ns_ = now_ns();
  }
  settle();
  wake_all(team_.segment.head().event);
}

// Ends the first call that some rank has not entered, and all behind it; what all have entered before will be carried
// out. A call behind a withdrawn one may still become full when a rank enters late, but every rank comes to the
// withdrawn one first.
void Engine::settle() {
  const std::vector<std::shared_ptr<Call>> calls(queue_.begin(), queue_.end());
  bool ended = false;
  for (const auto& call : calls) {
    if (call->stage_ == Stage::moving || call->stage_ == Stage::finishing) continue;
    if (call->stage_ == Stage::entered) {
      const auto target = gate_target(call->sequence_, team_.size);
      if (withdraw(team_.segment.gate(call->sequence_), target) == GateState::full && !ended) continue;
    }
    ended = true;
    retire(*call, std::make_exception_ptr(failed_->error));
  }
}

// Ends the call at the head, which all have entered, and everything behind it.
void Engine::fail_head(const Error& error) {
  const std::uint64_t sequence = queue_.front()->sequence_;
  if (!failed_) {
    failed_ = publish_cause(team_.segment.head().cause, {error, sequence});
    failed_ns_ = now_ns();
  }
  settle();
  if (!peers_.any_here()) take_memory_along();
  publish_done(sequence, true);
  while (!queue_.empty()) retire(*queue_.front(), std::make_exception_ptr(failed_->error));
  wake_all(team_.segment.head().event);
}

// A peer that is late will find our memory in its own mapping, and no longer in ours.
void Engine::take_memory_along() {
  for (const auto& call : queue_) {
    if (call->stage_ != Stage::queued && call->place_.allocation) call->place_.allocation->own().take_private();
  }
}

void Engine::close() {
  Lock lock(mutex_);
  for (const auto& call : queue_) {
    if (call->stage_ == Stage::moving || call->stage_ == Stage::finishing) continue;
    const std::string text = place_of(*call) + "this rank left the group before all ranks had entered the call";
    if (give_up(*call, ErrorCode::peer_lost, text)) break;
  }
  while (!queue_.empty()) {
    const auto last = queue_.back();
    unlock_and_sweep(lock);
    wait(*last);
    lock.lock();
  }
  unlock_and_sweep(lock);
  team_.segment.words(team_.rank).left.store(1);
  wake_all(team_.segment.head().event);
  progress_.stop();
}

std::string Engine::place_of(const Call& call) const {
  return "group " + name_ + ", rank " + std::to_string(team_.rank) + ", call " + std::to_string(call.sequence_) + ", " +
         describe(fingerprint_of(call)) + ": ";
}

std::string Engine::last_call_of(int rank) const {
  const std::uint64_t entered = team_.segment.words(rank).entered.load();
  if (entered == 0) return "it has made no call yet";
  const Fingerprint& f = team_.segment.header(rank, entered - 1).fingerprint;
  return "its last call was call " + std::to_string(entered - 1) + ", " + describe(f);
}

std::string Engine::lost_text(const Call& call) const {
  std::string text = place_of(call);
  for (int r = 0; r < team_.size; ++r) {
    if (!(gone_ >> r & 1)) continue;
    const bool left = team_.segment.words(r).left.load() != 0;
    text += "rank " + std::to_string(r) + ", " + peers_.process(r).shown() +
            (left ? ", left the group; " : ", died; ") + last_call_of(r) + ". ";
  }
  return text + "Look for its first error; the group can no longer be used.";
}

std::string Engine::absent_text(const Call& call) const {
  const Fingerprint f = fingerprint_of(call);
  std::string text =
      "group " + name_ + ", rank " + std::to_string(team_.rank) + ", call " + std::to_string(call.sequence_) + ": ";
  const std::string what = describe(f) + " within " + milliseconds(now_ns() - call.issued_ns_);
  bool anybody = false;
  for (int r = 0; r < team_.size; ++r) {
    if (r == team_.rank || team_.segment.words(r).entered.load() > call.sequence_) continue;
    text += "rank " + std::to_string(r) + ", " + peers_.process(r).shown() + ", has not entered " + what + "; " +
            last_call_of(r) + ". ";
    anybody = true;
  }
  if (!anybody) text += "earlier calls did not end, so not all ranks have entered " + what + ". ";
  return text + "It may be stopped, busy elsewhere, or have skipped a call.";
}

}  // namespace unisono::shm
