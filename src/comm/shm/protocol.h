#pragma once

#include <cstdint>

namespace unisono::shm {

// How ranks agree that a call happens, in words first. tests/comm/shm_protocol_model.cc explores every interleaving of
// it.
//
// Calls are numbered from 0. Call s uses *slot* s % kSlots, whose *gate* is a counter that only grows: the call is
// *full* when the gate has counted all ranks once for every use of the slot so far. Entering is one atomic addition, so
// there is one moment at which a call becomes full. A rank that gives up sets kWithdrawn by compare-and-swap while the
// gate is below its target; so either all ranks entered and all carry the call out, or no rank ever touches data of it.
//
// When a rank no longer touches anybody's memory for call s, it publishes its *done word*, which tells whether it ended
// well. A slot is used again only when all ranks are done with its former use. A call in which ranks write into each
// other's memory ends when all are done; before that nobody leaves, except past peers that are dead, and, past the
// deadline, by taking one's memory along (mapping private pages over it).

inline constexpr int kSlots = 16;
inline constexpr std::uint64_t kWithdrawn = 1ull << 63;

enum class GateState { open, full, withdrawn };

/// What the gate of call `sequence` counts when all `size` ranks have entered.
constexpr std::uint64_t gate_target(std::uint64_t sequence, int size, int slots = kSlots) {
  return (sequence / static_cast<std::uint64_t>(slots) + 1) * static_cast<std::uint64_t>(size);
}

constexpr GateState judge(std::uint64_t gate, std::uint64_t target) {
  if (gate & kWithdrawn) return GateState::withdrawn;
  return gate >= target ? GateState::full : GateState::open;
}

/// Enters the call. `Word` is std::atomic<uint64_t>.
template <typename Word>
GateState enter(Word& gate, std::uint64_t target) {
  return judge(gate.fetch_add(1) + 1, target);
}

/// Gives the call up if it is not full. Returns what was decided, `full` or `withdrawn`.
template <typename Word>
GateState withdraw(Word& gate, std::uint64_t target) {
  std::uint64_t seen = gate.load();
  while (judge(seen, target) == GateState::open) {
    if (gate.compare_exchange_weak(seen, seen | kWithdrawn)) return GateState::withdrawn;
  }
  return judge(seen, target);
}

constexpr std::uint64_t done_word(std::uint64_t sequence, bool failed) {
  return ((sequence + 1) << 1) | (failed ? 1 : 0);
}
/// Whether the rank with this done word no longer touches anybody's memory for call `sequence`.
constexpr bool is_done(std::uint64_t word, std::uint64_t sequence) { return (word >> 1) > sequence; }
/// Whether it can never end call `sequence` well any more.
constexpr bool has_failed_by(std::uint64_t word, std::uint64_t sequence) {
  return (word & 1) && (word >> 1) <= sequence + 1;
}
/// Whether it has ended call `sequence` well.
constexpr bool ended_well(std::uint64_t word, std::uint64_t sequence) {
  return is_done(word, sequence) && !has_failed_by(word, sequence);
}
/// Whether a rank may use the slot of call `sequence`, as far as the rank with this done word is concerned.
constexpr bool slot_is_free(std::uint64_t word, std::uint64_t sequence, int slots = kSlots) {
  const auto before = static_cast<std::uint64_t>(slots);
  return sequence < before || is_done(word, sequence - before);
}

}  // namespace unisono::shm
