#pragma once

#include <functional>

#include "differential/case.h"

namespace unisono::differential {

/// A smaller case that still fails: rounds, actions and options are left out as long as `fails` says so. `fails` also
/// says no when time is up.
Case shrink(Case c, const std::function<bool(const Case&)>& fails);

}  // namespace unisono::differential
