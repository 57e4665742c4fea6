#include "comm/fake/fake_state.h"

#include "base/clock.h"

namespace unisono {
namespace {

/// Two calls that belong together differ in nothing but their rank, their data, and what the rank puts in the record.
bool agree(const FakeCall& a, const FakeCall& b) {
  return a.operation == b.operation && a.count == b.count && a.dtype == b.dtype && a.op == b.op && a.root == b.root &&
         a.step == b.step && a.bucket == b.bucket && a.what == b.what &&
         a.control.words.size() == b.control.words.size() && a.control.sums.size() == b.control.sums.size() &&
         a.divide_by_sum == b.divide_by_sum;
}

std::string rank_is(int rank, const std::string& what) { return "rank " + std::to_string(rank) + " " + what; }

}  // namespace

std::string describe(const FakeCall& call) {
  std::string text = call.operation;
  if (call.operation != "barrier") {
    text += " of " + std::to_string(call.count) + " " + std::string(to_string(call.dtype));
  }
  std::string details;
  const auto add = [&details](const std::string& part) { details += (details.empty() ? "" : ", ") + part; };
  if (call.operation == "all_reduce" || call.operation == "reduce_scatter") add(std::string(to_string(call.op)));
  if (call.divide_by_sum >= 0) add("divided by sum " + std::to_string(call.divide_by_sum));
  if (call.root >= 0) add("root " + std::to_string(call.root));
  if (call.step >= 0) add("step " + std::to_string(call.step));
  if (call.bucket >= 0) add("bucket " + std::to_string(call.bucket));
  if (!call.what.empty()) add(call.what);
  if (!call.control.empty()) {
    add("control record of " + std::to_string(call.control.words.size()) + " words and " +
        std::to_string(call.control.sums.size()) + " sums");
  }
  return details.empty() ? text : text + " (" + details + ")";
}

FakeRound& FakeWorld::State::round(std::int64_t sequence) {
  while (static_cast<std::int64_t>(rounds.size()) <= sequence) {
    rounds.emplace_back().entries.resize(static_cast<std::size_t>(size));
  }
  return rounds[static_cast<std::size_t>(sequence)];
}

std::string FakeWorld::State::last_call(int rank) const {
  const auto r = static_cast<std::size_t>(rank);
  if (made[r] == 0) return "it has made no call";
  const auto& entry = rounds[static_cast<std::size_t>(made[r] - 1)].entries[r];
  return "its last call was " + std::to_string(made[r] - 1) + ", " + describe(entry->call);
}

void FakeWorld::State::throw_if_poisoned() const {
  if (poison) throw Error(*poison);
}

std::int64_t FakeWorld::State::enter(FakeEntry entry) {
  const auto r = static_cast<std::size_t>(entry.call.rank);
  const std::int64_t sequence = made[r]++;
  entry.call.sequence = sequence;
  entry.entered_ns = now_ns();
  FakeRound& here = round(sequence);
  here.entries[r] = std::move(entry);
  if (const auto planned = failures.find(sequence); planned != failures.end()) fail(planned->second);
  for (const auto& other : here.entries) {
    if (!other || agree(other->call, here.entries[r]->call)) continue;
    const FakeCall* low = &here.entries[r]->call;
    const FakeCall* high = &other->call;
    if (low->rank > high->rank) std::swap(low, high);
    fail(Error(ErrorCode::mismatch, "unisono fake group, call " + std::to_string(sequence) +
                                        ": ranks disagree: " + rank_is(low->rank, "calls ") + describe(*low) + ", " +
                                        rank_is(high->rank, "calls ") + describe(*high) +
                                        ". All ranks must make the same calls in the same order"));
    break;
  }
  advance(sequence);
  return sequence;
}

void FakeWorld::State::advance(std::int64_t sequence) {
  FakeRound& here = round(sequence);
  if (here.ended) return;
  for (int r = 0; r < size; ++r) {
    if (here.entries[static_cast<std::size_t>(r)]) continue;
    bool somebody_waits = false;
    for (const auto& entry : here.entries) somebody_waits |= entry.has_value();
    if (somebody_waits && lost[static_cast<std::size_t>(r)]) {
      fail(Error(ErrorCode::peer_lost, "unisono fake group, call " + std::to_string(sequence) + ": " +
                                           rank_is(r, "is gone; ") + last_call(r)));
    }
    return;
  }
  if (holding && !here.released) {
    changed.notify_all();
    return;
  }
  execute(here);
  end(sequence, nullptr);
}

void FakeWorld::State::end(std::int64_t sequence, std::exception_ptr error) {
  FakeRound& here = round(sequence);
  here.ended = true;
  here.error = std::move(error);
  for (auto& entry : here.entries) {
    if (entry) entry->in.owner = entry->out.owner = nullptr;
  }
  ended.push_back(sequence);
  changed.notify_all();
}

void FakeWorld::State::fail(const Error& cause) {
  if (!poison) poison.emplace(cause);
  const auto error = std::make_exception_ptr(Error(*poison));
  for (std::size_t k = 0; k < rounds.size(); ++k) {
    if (!rounds[k].ended) end(static_cast<std::int64_t>(k), error);
  }
}

void FakeWorld::State::time_out(std::int64_t sequence, int rank) {
  FakeRound& here = round(sequence);
  const auto& own = here.entries[static_cast<std::size_t>(rank)];
  std::string missing;
  for (int r = 0; r < size; ++r) {
    if (here.entries[static_cast<std::size_t>(r)]) continue;
    missing += (missing.empty() ? "" : "; ") + rank_is(r, "has not entered it, ") + last_call(r);
  }
  if (missing.empty()) missing = "all ranks have entered it and the script holds it";
  fail(Error(ErrorCode::timeout, "unisono fake group, call " + std::to_string(sequence) + ", " + describe(own->call) +
                                     ": the deadline of rank " + std::to_string(rank) + " has passed: " + missing));
}

}  // namespace unisono
