#pragma once

#include <unisono/error.h>

#include <cstdint>
#include <optional>

#include "comm/shm/layout.h"

namespace unisono::shm {

/// Why the group failed, and the first call that fails with it.
struct Cause {
  Error error;
  std::uint64_t from = 0;
};

/// Writes the group's cause if it has none yet; returns the one that stands, which all ranks will report.
Cause publish_cause(CauseArea& area, const Cause& mine);
/// Whether a rank has begun to publish one.
inline bool has_cause(const CauseArea& area) { return area.state.load(std::memory_order_acquire) != 0; }
/// The cause; empty while there is none or while it is being written.
std::optional<Cause> read_cause(const CauseArea& area);

}  // namespace unisono::shm
