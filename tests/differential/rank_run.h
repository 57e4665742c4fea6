#pragma once

#include <unisono/unisono.h>

#include <memory>

#include "differential/case.h"
#include "differential/record.h"

namespace unisono::differential {

/// Runs a case as one rank of `group`. *Collective*. *Blocks*. Throws nothing: what goes wrong is in the record, and
/// the group is then aborted so that nobody waits.
RankRecord run_rank(const Case& c, const std::shared_ptr<ProcessGroup>& group);

}  // namespace unisono::differential
