#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

// A model of how ranks agree on calls in shared memory (src/comm/shm/protocol.h; the engine's stages have the same
// names). All interleavings of the ranks' atomic steps are explored. Ranks may die at any moment, and deadlines may
// pass at any moment.

namespace unisono::testing::model {

inline constexpr int kRanks = 3;  // at most
inline constexpr int kCalls = 2;

enum class Kind : std::uint8_t { small, staged, in_place };

/// Ways to get it wrong, each of which the exploration must find.
enum class Mutant {
  none,
  withdraw_without_compare,
  finish_not_awaited,
  memory_left_behind,
  slot_not_awaited,
  predecessor_not_awaited,
  done_before_writing,
  carries_on_behind_a_withdrawn_call,
};

struct Scenario {
  int ranks = 2;
  int slots = 1;
  std::array<Kind, kCalls> kinds = {Kind::in_place, Kind::in_place};
  bool deadlines = true;  ///< may pass
  int deaths = 1;         ///< at most
  bool threads = false;   ///< ranks of one process: they cannot take their memory along
  Mutant mutant = Mutant::none;
};

struct Report {
  std::string violation;  ///< empty: none
  std::size_t states = 0;
};

/// Explores every interleaving, or until the first violation of:
/// - a rank writes only into memory of ranks that are in the call, dead, or have taken their memory along;
/// - no rank writes data of a call from which a rank withdrew;
/// - no rank ends a call well when a rank withdrew from an earlier one;
/// - in the end all living ranks have ended all calls; without deadlines they agree on which ended well, and without
///   deaths as well, all did.
Report explore(const Scenario& scenario);

}  // namespace unisono::testing::model
