#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "differential/case.h"
#include "differential/rank_pool.h"

namespace unisono::differential {

/// Runs a case on the pool's ranks and in the reference. Nothing when they agree; else the first difference in words.
std::optional<std::string> difference_of(const Case& c, RankPool& pool);

}  // namespace unisono::differential
