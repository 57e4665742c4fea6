#pragma once

#include <unisono/buffer.h>

namespace unisono {

/// Writes sums that an engine has left in CPU memory to where they belong: divided (0 gives zeros), rounded to f16 or
/// bf16 once, and with NaNs that have no payload, as our own kernels leave them. `wire` is f64 for f64, else f32, `out`
/// floating.
void finish_sum(const void* wire, const Buffer& out, double divisor);

}  // namespace unisono
