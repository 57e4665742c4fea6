#pragma once

#include <array>

namespace unisono::differential {

/// What programs are not drawn to do, and why. Printed with every summary. Take an entry out together with the rule
/// that keeps the case away.
inline constexpr std::array kExcluded = {
    "weights: edits of gradients between the backwards of one window, but for clearing all of them: refused by name",
    "weights: sync_grads() on a rank that gave no weight in this window is another operation than the others'",
    "a backward that throws under no_sync before it reaches a parameter, without weights or uneven_accumulation: the "
    "pass repeated "
    "on all ranks makes their counts differ",
};

}  // namespace unisono::differential
