#pragma once

#include <unisono/dtype.h>

#include <cstddef>
#include <cstdint>
#include <vector>

// What collectives must compute, written as plainly as possible and sharing no code with the library: one element at a
// time, the tree by recursion, the 16-bit formats by arithmetic.

namespace unisono::testing {

using Bytes = std::vector<unsigned char>;

/// `any`: mostly moderate numbers of both signs, some of them special (NaNs with payloads, infinities, both zeros,
/// denormals, extremes). `small`: floating ones are whole, from -4 to 4, and none is -0.0: sums and products of up to
/// four are exact in every format, so that they are the same in any order.
enum class Numbers { any, small };
/// Deterministic elements of `dtype`.
Bytes make_elements(Dtype dtype, std::size_t count, std::uint64_t seed, Numbers numbers = Numbers::any);

/// The reduction of one buffer per rank. `avg` divides by the number of ranks, sums by `divisor`.
Bytes reduce_reference(const std::vector<Bytes>& inputs, Dtype dtype, ReduceOp op, double divisor = 1);

/// The balanced-tree sum of control record entries.
double tree_sum(const std::vector<double>& values);

float widen_f16(std::uint16_t h);
std::uint16_t narrow_f16(float value);
float widen_bf16(std::uint16_t h);
std::uint16_t narrow_bf16(float value);

inline const std::vector<Dtype> kDtypes = {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16,   Dtype::i8,
                                           Dtype::u8,  Dtype::i32, Dtype::i64, Dtype::boolean};
inline const std::vector<ReduceOp> kOps = {ReduceOp::sum,     ReduceOp::avg,     ReduceOp::min,    ReduceOp::max,
                                           ReduceOp::product, ReduceOp::bit_and, ReduceOp::bit_or, ReduceOp::bit_xor};

}  // namespace unisono::testing
