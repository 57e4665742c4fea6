#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace unisono {

/// Element types that cross ranks. Complex numbers travel as pairs of their real type.
enum class Dtype : std::uint8_t { f32, f64, f16, bf16, i8, u8, i32, i64, boolean };

/// How elements of several ranks become one.
/// Sums run in a balanced binary tree over ranks, element by element, whatever the slicing; f16 and bf16 are
/// accumulated in f32 and rounded once. `avg` is the sum divided by the group's size (not for integers and bool).
/// Bitwise operations are for integers and bool. For bool, sum is or, product and min are and, max is or.
enum class ReduceOp : std::uint8_t { sum, avg, min, max, product, bit_and, bit_or, bit_xor };

std::size_t size_of(Dtype dtype) noexcept;         ///< bytes of one element
std::string_view to_string(Dtype dtype) noexcept;  ///< "f32"
std::string_view to_string(ReduceOp op) noexcept;  ///< "sum"

/// Whether `op` is defined for elements of `dtype`.
bool is_defined(ReduceOp op, Dtype dtype) noexcept;

}  // namespace unisono
