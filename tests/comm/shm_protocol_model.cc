#include "comm/shm_protocol_model.h"

#include <cstring>
#include <stdexcept>
#include <unordered_set>

#include "comm/shm/protocol.h"

namespace unisono::testing::model {
namespace {

using namespace unisono::shm;

enum class Stage : std::uint8_t { entered, withdrawing, moving, writing, publishing, finishing, leaving };
enum class End : std::uint8_t { none, well, failed };

// One byte each, no padding: a state is hashed as bytes.
struct Rank {
  std::uint8_t entered = 0;  // calls
  std::uint8_t head = 0;     // the first call that has not ended
  Stage stage = Stage::entered;
  std::uint8_t index = 0;  // of the rank looked at or written to next
  std::uint8_t seen = 0;   // gate, while withdrawing
  std::uint8_t failed = 0;
  std::uint8_t dead = 0;
  std::uint8_t moved_away = 0;  // took its memory along
  std::array<End, kCalls> ends = {};
};

struct State {
  std::array<std::uint8_t, kCalls> gates = {};  // bit 7: withdrawn
  std::array<std::uint8_t, kRanks> done = {};
  std::array<std::uint8_t, kRanks> put = {};  // staged calls: how many each rank has put its data in for
  std::uint8_t cause = 0;
  std::uint8_t deaths = 0;
  std::array<std::uint8_t, kCalls> withdrawn = {};
  std::array<std::uint8_t, kCalls> written = {};
  std::array<Rank, kRanks> ranks = {};
};

std::uint64_t widen(std::uint8_t gate) { return (gate & 0x7fu) | (gate & 0x80u ? kWithdrawn : 0); }

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Explorer {
 public:
  explicit Explorer(const Scenario& scenario) : scenario_(scenario) {}

  Report run() {
    visit(State{});
    try {
      while (!stack_.empty()) {
        const State state = stack_.back();
        stack_.pop_back();
        expand(state);
      }
    } catch (const Violation& v) {
      return {v.what(), seen_.size()};
    }
    return {"", seen_.size()};
  }

 private:
  bool is(Mutant mutant) const { return scenario_.mutant == mutant; }
  Kind kind(int call) const { return scenario_.kinds[static_cast<std::size_t>(call)]; }
  std::uint8_t& gate(State& s, int call) const { return s.gates[static_cast<std::size_t>(call % scenario_.slots)]; }
  std::uint64_t target(int call) const {
    return gate_target(static_cast<std::uint64_t>(call), scenario_.ranks, scenario_.slots);
  }

  void visit(const State& state) {
    if (seen_.insert(std::string(reinterpret_cast<const char*>(&state), sizeof state)).second) stack_.push_back(state);
  }

  void expand(const State& state) {
    const std::size_t before = successors_;
    for (int r = 0; r < scenario_.ranks; ++r) {
      const Rank& rank = state.ranks[static_cast<std::size_t>(r)];
      if (rank.dead) continue;
      if (state.deaths < scenario_.deaths && rank.head < kCalls) {
        State next = state;
        next.ranks[static_cast<std::size_t>(r)].dead = 1;
        ++next.deaths;
        visit(next);  // not a successor that counts: nobody may need a death to go on
      }
      enter_next(state, r);
      if (rank.head < rank.entered) head_steps(state, r);
      if (rank.head == rank.entered && rank.head < kCalls) give_up_unentered(state, r);
    }
    if (successors_ == before) check_end(state);
  }

  void go(const State& next) {
    ++successors_;
    visit(next);
  }

  void enter_next(const State& state, int r) {
    const Rank& rank = state.ranks[static_cast<std::size_t>(r)];
    const int call = rank.entered;
    if (call >= kCalls || rank.failed) return;
    for (int q = 0; q < scenario_.ranks; ++q) {
      const bool free =
          slot_is_free(state.done[static_cast<std::size_t>(q)], static_cast<std::uint64_t>(call), scenario_.slots);
      if (!free && !is(Mutant::slot_not_awaited)) return;
    }
    State next = state;
    Rank& me = next.ranks[static_cast<std::size_t>(r)];
    ++me.entered;
    std::uint8_t& word = gate(next, call);
    word = static_cast<std::uint8_t>(word + 1);
    go(next);
  }

  bool anybody_dead(const State& state) const {
    for (int q = 0; q < scenario_.ranks; ++q) {
      if (state.ranks[static_cast<std::size_t>(q)].dead) return true;
    }
    return false;
  }
  bool may_give_up(const State& state) const { return scenario_.deadlines || state.cause || anybody_dead(state); }

  // A call whose slot is still in use: nothing was entered, so nothing has to be withdrawn.
  void give_up_unentered(const State& state, int r) {
    if (!may_give_up(state)) return;
    State next = state;
    fail_from(next, r, state.ranks[static_cast<std::size_t>(r)].head);
    go(next);
  }

  // Ends this call and all behind it.
  void fail_from(State& s, int r, int call) const {
    Rank& me = s.ranks[static_cast<std::size_t>(r)];
    s.cause = 1;
    me.failed = 1;
    me.stage = Stage::entered;
    me.index = me.seen = 0;
    for (me.head = static_cast<std::uint8_t>(call); me.head < kCalls; ++me.head) {
      const bool full =
          me.head > call && me.head < me.entered && judge(widen(gate(s, me.head)), target(me.head)) == GateState::full;
      if (full && is(Mutant::carries_on_behind_a_withdrawn_call)) return;
      me.ends[me.head] = End::failed;
    }
  }

  void end_well(State& s, int r) const {
    Rank& me = s.ranks[static_cast<std::size_t>(r)];
    for (int c = 0; c < me.head; ++c) {
      if (s.withdrawn[static_cast<std::size_t>(c)]) throw Violation("a call ended well after one that was withdrawn");
    }
    me.ends[me.head] = End::well;
    ++me.head;
    me.stage = Stage::entered;
    me.index = 0;
  }

  void head_steps(const State& state, int r) {
    const Rank& rank = state.ranks[static_cast<std::size_t>(r)];
    switch (rank.stage) {
      case Stage::entered:
        return step_entered(state, r);
      case Stage::withdrawing:
        return step_withdrawing(state, r);
      case Stage::moving:
        return step_moving(state, r);
      case Stage::writing:
        return step_writing(state, r);
      case Stage::publishing:
        return step_publishing(state, r);
      case Stage::finishing:
        return step_finishing(state, r);
      case Stage::leaving:
        return step_leaving(state, r);
    }
  }

  void step_entered(const State& state, int r) {
    State next = state;
    Rank& me = next.ranks[static_cast<std::size_t>(r)];
    const auto decided = judge(widen(gate(next, me.head)), target(me.head));
    if (decided == GateState::full) {
      me.stage = Stage::moving;
      go(next);
    } else if (decided == GateState::withdrawn) {
      if (!state.cause) return;  // whoever withdrew will tell why
      fail_from(next, r, me.head);
      go(next);
    }
    if (decided == GateState::open && may_give_up(state)) {
      next = state;
      next.ranks[static_cast<std::size_t>(r)].stage = Stage::withdrawing;
      next.ranks[static_cast<std::size_t>(r)].seen = gate(next, me.head);
      go(next);
    }
  }

  // The compare-and-swap of `withdraw`.
  void step_withdrawing(const State& state, int r) {
    State next = state;
    Rank& me = next.ranks[static_cast<std::size_t>(r)];
    std::uint8_t& word = gate(next, me.head);
    if (word != me.seen && !is(Mutant::withdraw_without_compare)) {
      me.stage = Stage::entered;
      me.seen = 0;
    } else {
      word |= 0x80;
      next.withdrawn[me.head] = 1;
      if (next.written[me.head]) throw Violation("withdrew from a call whose data was touched");
      fail_from(next, r, me.head);
    }
    go(next);
  }

  void step_moving(const State& state, int r) {
    State next = state;
    Rank& me = next.ranks[static_cast<std::size_t>(r)];
    if (kind(me.head) == Kind::small) {
      next.done[static_cast<std::size_t>(r)] = static_cast<std::uint8_t>(done_word(me.head, false));
      end_well(next, r);
      return go(next);
    }
    if (kind(me.head) == Kind::staged) return step_staged(state, r);
    // ready_to_write, a rank per step
    if (me.index < scenario_.ranks) {
      const auto word = state.done[me.index];
      if (me.head > 0 && !ended_well(word, me.head - 1u) && !is(Mutant::predecessor_not_awaited)) {
        return leave_if_hopeless(state, r);
      }
      ++me.index;
      return go(next);
    }
    me.index = 0;
    me.stage = is(Mutant::done_before_writing) ? Stage::publishing : Stage::writing;
    go(next);
  }

  // Puts its part, then needs everybody's. Leaves at a deadline, or when a rank it needs is dead or has failed.
  void step_staged(const State& state, int r) {
    State next = state;
    Rank& me = next.ranks[static_cast<std::size_t>(r)];
    if (next.put[static_cast<std::size_t>(r)] <= me.head) {
      next.put[static_cast<std::size_t>(r)] = static_cast<std::uint8_t>(me.head + 1);
      return go(next);
    }
    bool all = true;
    bool hopeless = scenario_.deadlines || state.cause;
    for (int q = 0; q < scenario_.ranks; ++q) {
      if (state.put[static_cast<std::size_t>(q)] > me.head) continue;
      all = false;
      hopeless |= state.ranks[static_cast<std::size_t>(q)].dead ||
                  has_failed_by(state.done[static_cast<std::size_t>(q)], me.head);
    }
    if (all) {
      next.done[static_cast<std::size_t>(r)] = static_cast<std::uint8_t>(done_word(me.head, false));
      end_well(next, r);
      go(next);
    } else if (hopeless) {
      fail_head(next, r);
    }
  }

  // While it waits for the end of the call before. Threads, which cannot take their memory along, do not leave at a
  // deadline.
  void leave_if_hopeless(const State& state, int r) {
    const std::uint64_t before = state.ranks[static_cast<std::size_t>(r)].head - 1u;
    bool hopeless = scenario_.deadlines && !scenario_.threads;
    for (int q = 0; q < scenario_.ranks; ++q) {
      const auto word = state.done[static_cast<std::size_t>(q)];
      hopeless |=
          has_failed_by(word, before + 1) || (state.ranks[static_cast<std::size_t>(q)].dead && !is_done(word, before));
    }
    if (hopeless) fail_head(state, r);
  }

  void step_writing(const State& state, int r) {
    State next = state;
    Rank& me = next.ranks[static_cast<std::size_t>(r)];
    const Rank& owner = state.ranks[me.index];
    const bool in_call = owner.entered > me.head && owner.head <= me.head;
    if (!in_call && !owner.dead && !owner.moved_away)
      throw Violation("wrote into memory of a rank that was not in the call");
    next.written[me.head] = 1;
    if (next.withdrawn[me.head]) throw Violation("wrote data of a call from which a rank withdrew");
    if (++me.index == scenario_.ranks) {
      me.index = 0;
      me.stage = is(Mutant::done_before_writing) ? Stage::finishing : Stage::publishing;
    }
    go(next);
  }

  void step_publishing(const State& state, int r) {
    State next = state;
    Rank& me = next.ranks[static_cast<std::size_t>(r)];
    next.done[static_cast<std::size_t>(r)] = static_cast<std::uint8_t>(done_word(me.head, false));
    me.stage = is(Mutant::done_before_writing) ? Stage::writing : Stage::finishing;
    if (is(Mutant::finish_not_awaited)) end_well(next, r);
    go(next);
  }

  // Looks at the done words, a rank per step.
  void step_finishing(const State& state, int r) {
    State next = state;
    Rank& me = next.ranks[static_cast<std::size_t>(r)];
    const auto call = static_cast<std::uint64_t>(me.head);
    if (me.index == scenario_.ranks) {
      end_well(next, r);
      return go(next);
    }
    if (ended_well(state.done[me.index], call)) {
      ++me.index;
      return go(next);
    }
    bool hopeless = false;
    bool alive = false;
    for (int q = 0; q < scenario_.ranks; ++q) {
      const auto word = state.done[static_cast<std::size_t>(q)];
      const bool lost =
          has_failed_by(word, call) || (state.ranks[static_cast<std::size_t>(q)].dead && !is_done(word, call));
      hopeless |= lost;
      alive |= q != r && !lost && !is_done(word, call);
    }
    if (hopeless && !(alive && scenario_.threads)) {
      fail_head(next, r);
    } else if (scenario_.deadlines && alive && !scenario_.threads) {
      fail_head(next, r);
    }
  }

  // The memory first, then the cause, and the done word in a step of its own.
  void fail_head(State next, int r) {
    Rank& me = next.ranks[static_cast<std::size_t>(r)];
    me.moved_away = !scenario_.threads && !is(Mutant::memory_left_behind);
    next.cause = 1;
    me.failed = 1;
    me.stage = Stage::leaving;
    go(next);
  }

  void step_leaving(const State& state, int r) {
    State next = state;
    const int call = state.ranks[static_cast<std::size_t>(r)].head;
    next.done[static_cast<std::size_t>(r)] =
        static_cast<std::uint8_t>(done_word(static_cast<std::uint64_t>(call), true));
    fail_from(next, r, call);
    go(next);
  }

  void check_end(const State& state) const {
    for (int c = 0; c < kCalls; ++c) {
      End agreed = End::none;
      for (int r = 0; r < scenario_.ranks; ++r) {
        const Rank& rank = state.ranks[static_cast<std::size_t>(r)];
        if (rank.dead) continue;
        const End end = rank.ends[static_cast<std::size_t>(c)];
        if (end == End::none) throw Violation("a living rank waits for ever in call " + std::to_string(c));
        if (scenario_.deadlines) continue;
        if (agreed != End::none && end != agreed)
          throw Violation("ranks disagree on how call " + std::to_string(c) + " ended");
        agreed = end;
        if (state.deaths == 0 && end != End::well) throw Violation("a call failed for no reason");
      }
    }
  }

  const Scenario scenario_;
  std::unordered_set<std::string> seen_;
  std::vector<State> stack_;
  std::size_t successors_ = 0;
};

}  // namespace

Report explore(const Scenario& scenario) { return Explorer(scenario).run(); }

}  // namespace unisono::testing::model
