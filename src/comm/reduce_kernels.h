#pragma once

#include <unisono/dtype.h>

#include <cstddef>
#include <span>

namespace unisono {

/// Reduces `count` elements over `inputs` (one pointer per rank, in rank order) and writes the result to every one of
/// `outputs`; an output may be the same memory as an input (exactly, not shifted).
///
/// The order is a balanced binary tree over ranks, per element: n inputs split at the largest power of two below n.
/// So the bits of the result do not depend on slicing, on alignment or on which rank computes. f16 and bf16 are
/// widened to f32 once, reduced, and rounded once.
///
/// Where there is arithmetic, a result that is NaN is always the same quiet NaN, for hardware would pick a payload by
/// the order of operands. min and max: NaN wins; of equal values (-0.0 and 0.0) the lower rank's stays.
///
/// `divisor`: floating sums are divided by it in the same pass; 1 leaves the bits of the sum as they are, 0 writes
/// zeros.
/// *Throws* nothing; the caller has checked `is_defined(op, dtype)`. `avg` is passed as sum with a divisor.
void tree_reduce(std::span<const void* const> inputs, std::span<void* const> outputs, std::size_t count, Dtype dtype,
                 ReduceOp op, double divisor);

}  // namespace unisono
