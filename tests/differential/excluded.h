#pragma once

#include <array>

namespace unisono::differential {

/// What programs are not drawn to do, because what should come of it is not settled or known not to come. Printed with every
/// summary. Take an entry out together with the rule that keeps the case away.
inline constexpr std::array kExcluded = {
    "weights: a backward that throws under no_sync, or before it reaches a parameter, leaves its count in the window",
    "weights: two calls of weight() before the first of their backwards count both for that one",
    "weights: edits of gradients and zero_grad() between the backwards of one window: what was set aside comes back after",
    "weights: sync_grads() on a rank that gave no weight in this window is another operation than the others'",
    "a backward that throws under no_sync without uneven_accumulation: the repeated pass makes the ranks' counts differ",
    "after a backward that threw, zero_grad() in place: ranks differ in which gradients are defined",
};

}  // namespace unisono::differential
