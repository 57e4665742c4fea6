#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "base/float16.h"

// What the reduction kernels know about element types and operations. Everything is forced inline, so that it takes
// the instruction set of the kernel it lands in.

#define UNISONO_INLINE [[gnu::always_inline]] static inline

namespace unisono::kernels {

/// How a type is stored in memory and in which type it is accumulated.
/// A NaN result is always the one canonical quiet NaN: which payload survives `a + b` depends on the order of the
/// operands in the instruction, which the compiler is free to choose.
template <typename T>
struct Plain {
  using Storage = T;
  using Accumulator = T;
  UNISONO_INLINE T load(T v) { return v; }
  UNISONO_INLINE T store(T v) {
    if constexpr (std::numeric_limits<T>::has_quiet_NaN) return v == v ? v : std::numeric_limits<T>::quiet_NaN();
    return v;
  }
};

/// `nan` where v is one, else `rounded`; without a comparison, which would keep the loop from becoming vector code.
UNISONO_INLINE std::uint16_t nan_or(std::uint32_t nan, float v, std::uint16_t rounded) {
  const std::uint32_t is_nan = bits::mask_below(0x7f800000u, std::bit_cast<std::uint32_t>(v) & 0x7fffffffu);
  return static_cast<std::uint16_t>(bits::select(is_nan, nan, rounded));
}

struct Half {
  using Storage = std::uint16_t;
  using Accumulator = float;
  UNISONO_INLINE float load(std::uint16_t v) { return f16_to_f32(v); }
  UNISONO_INLINE std::uint16_t store(float v) { return nan_or(0x7e00u, v, f32_to_f16(v)); }
};

struct Bfloat {
  using Storage = std::uint16_t;
  using Accumulator = float;
  UNISONO_INLINE float load(std::uint16_t v) { return bf16_to_f32(v); }
  UNISONO_INLINE std::uint16_t store(float v) { return nan_or(0x7fc0u, v, f32_to_bf16(v)); }
};

/// Any byte but 0 is true; results are 0 or 1.
struct Bool {
  using Storage = std::uint8_t;
  using Accumulator = std::uint8_t;
  UNISONO_INLINE std::uint8_t load(std::uint8_t v) { return v != 0; }
  UNISONO_INLINE std::uint8_t store(std::uint8_t v) { return v; }
};

struct Sum {
  template <typename T>
  UNISONO_INLINE T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};

struct Product {
  template <typename T>
  UNISONO_INLINE T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
};

/// A NaN on either side wins; of two equal values (-0.0 and 0.0) the left one stays.
struct Min {
  template <typename T>
  UNISONO_INLINE T apply(T a, T b) {
    return (b < a) | (b != b) ? b : a;
  }
};

struct Max {
  template <typename T>
  UNISONO_INLINE T apply(T a, T b) {
    return (b > a) | (b != b) ? b : a;
  }
};

struct And {
  template <typename T>
  UNISONO_INLINE T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <typename T>
  UNISONO_INLINE T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <typename T>
  UNISONO_INLINE T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

}  // namespace unisono::kernels

#undef UNISONO_INLINE
