#pragma once

#include <unisono/dtype.h>

#include <span>

namespace unisono {

/// The instruction sets `tree_reduce` is compiled for. The bits of its result are the same on each.
enum class Isa { baseline, avx2 };

/// The best one this machine runs; what `tree_reduce` uses.
Isa best_isa() noexcept;

/// `tree_reduce` on a given instruction set; for tests.
void tree_reduce_on(Isa isa, std::span<const void* const> inputs, std::span<void* const> outputs, std::size_t count,
                    Dtype dtype, ReduceOp op, double divisor);

}  // namespace unisono
