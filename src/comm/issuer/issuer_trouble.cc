// When a call does not end: whose fault it is, and how everybody learns of it.
#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/issuer/issuer.h"

namespace unisono {
namespace {

using Clock = IssuedCall::Clock;
constexpr auto kSlice = std::chrono::milliseconds(50);  // between looks at deadlines and at the notice board

bool mentions(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return text.find(word) != std::string::npos; });
}

std::string list(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
  return out;
}

}  // namespace

// Now and then while calls are under way: has a peer failed, is anything overdue, and tell the others where this rank
// waits.
void Issuer::look_around() {
  const auto now = Clock::now();
  if (idle() || now - looked_ < kSlice) {
    if (idle()) looked_ = now;
    return;
  }
  looked_ = now;
  if (auto failure = posted_failure()) throw *failure;
  if (board_ && std::exchange(posted_sequence_, newest_) != newest_) board_->post_waiting(newest_);
  const auto check = [&](const CallPtr& call) {
    if (now > call->deadline + engine_->info().grace) throw overdue(*call, "");
  };
  std::for_each(moving_.begin(), moving_.end(), check);
  std::for_each(waiting_.begin(), waiting_.end(), check);
  std::for_each(agreed_.begin(), agreed_.end(), check);
  std::for_each(following_.begin(), following_.end(), check);
  std::for_each(halfway_.begin(), halfway_.end(), check);
  for (const auto& [sequence, call] : held_) check(call);
}

void Issuer::fail_all(const Error& cause) {
  engine_->abort(cause);
  const auto soon = Clock::now() + std::chrono::seconds(1);
  const auto abandon = [&](std::optional<EngineOp>& op) {
    if (!op) return;
    while (op->local && !op->done() && Clock::now() < soon) std::this_thread::yield();
    op->then = nullptr;  // with them goes what they hold of the caller's
    op->finish = nullptr;
    abandoned_.push_back(std::move(*op));
    op.reset();
  };
  const auto fail = [&](auto& calls) {
    for (auto& call : calls) abandon(call->op);
    for (auto& call : calls) {
      call->fail(cause);
      if (call->whole) call->whole->fail(cause);
    }
    calls.clear();
  };
  abandon(exchange_);
  fail(moving_);
  fail(waiting_);
  fail(agreed_);
  fail(following_);
  fail(halfway_);
  for (auto& [sequence, call] : held_) call->fail(cause);
  held_.clear();
}

// Calls are made in one order, so a rank that has not entered this one made the one before it last.
Error Issuer::overdue(const IssuedCall& call, const std::string& engine_text) {
  const double seconds = std::chrono::duration<double>(call.timeout).count();
  std::string text = describe_(call) + ": not ended after " + std::to_string(seconds).substr(0, 6) + " s: ";
  const auto absent = board_ ? board_->absent(call.header.sequence) : std::vector<int>{};
  const std::string silence = board_ ? board_->silence() : "";
  if (absent.empty()) {
    text += "a peer does not answer" + (silence.empty() ? "" : ", and " + silence);
  } else if (call.phase == IssuedCall::Phase::data) {
    text += list(absent) + (absent.size() == 1 ? " has" : " have") +
            " entered it and not been heard of since: stopped, or behind a cut link";
  } else {
    text += list(absent) + (absent.size() == 1 ? " has" : " have") +
            " not entered this call; the last call there was " + (last_entered_.empty() ? "none" : last_entered_);
  }
  if (!engine_text.empty()) text += " (" + engine_text + ")";
  return Error(ErrorCode::timeout,
               text + ". Look there for the cause, or raise the timeout. The group is unusable now.");
}

// An engine rarely tells whose connection it was. Who else does not answer a call of the roll may only be computing,
// but that is said.
Error Issuer::lost(const IssuedCall& call, const std::string& engine_text) {
  constexpr std::chrono::milliseconds kPatience(1000);
  std::string who = "a peer died or left the group";
  if (const auto gone = engine_->lost(); !gone.empty()) {
    who = list(gone) + " died or left the group";
  } else if (board_) {
    const auto silent = board_->unheard(std::clamp(call.left(), std::chrono::milliseconds(100), kPatience));
    if (auto failure = posted_failure()) return *failure;
    if (!silent.empty())
      who += ", and " + list(silent) + (silent.size() == 1 ? " does" : " do") + " not answer any more";
    if (const auto silence = board_->silence(); silent.empty() && !silence.empty()) who += ", and " + silence;
  }
  return Error(ErrorCode::peer_lost,
               describe_(call) + ": " + who + " (" + engine_text + "). The group is unusable now.");
}

Error Issuer::translate(const IssuedCall& call, const std::exception& raised) {
  const std::string text(raised.what(), std::strcspn(raised.what(), "\n"));
  const auto* ours = dynamic_cast<const Error*>(&raised);  // an engine that knows our errors
  if ((ours && ours->code() == ErrorCode::timeout) ||
      (!ours && (Clock::now() >= call.deadline || mentions(text, {"imed out", "imeout"}))))
    return overdue(call, text);
  // A peer that left because its group had failed has said so before it went.
  if (auto failure = posted_failure()) return *failure;
  if (ours && ours->code() != ErrorCode::peer_lost) return Error(ours->code(), describe_(call) + ": " + text);
  if (ours || mentions(text, {"onnection", "closed", "reset", "roken pipe", "ransport endpoint"}))
    return lost(call, text);
  return Error(ErrorCode::internal, describe_(call) + ": the engine failed: " + text);
}

}  // namespace unisono
