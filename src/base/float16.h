#pragma once

#include <bit>
#include <cstdint>

namespace unisono {

// Conversions between f32 and the two 16-bit formats, as integer code without comparisons, so that loops over them
// become vector code on any machine. Rounding is to nearest, ties to even. A NaN stays a NaN, made quiet by the
// conversions of f16 and to bf16, its upper payload bits kept. Nothing depends on whether the thread flushes denormals.

#define UNISONO_INLINE [[gnu::always_inline]] inline

namespace bits {

/// All ones where a < b, else zero; both below 2^31.
UNISONO_INLINE std::uint32_t mask_below(std::uint32_t a, std::uint32_t b) noexcept {
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(a - b) >> 31);
}

UNISONO_INLINE std::uint32_t select(std::uint32_t mask, std::uint32_t yes, std::uint32_t no) noexcept {
  return no ^ ((yes ^ no) & mask);
}

}  // namespace bits

/// *Source*: IEEE 754-2008 binary16: 1 sign bit, 5 exponent bits (bias 15), 10 mantissa bits.
UNISONO_INLINE float f16_to_f32(std::uint16_t h) noexcept {
  const std::uint32_t sign = (h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);  // exponent bias 127 - 15
  const std::uint32_t quiet = 0x00400000u & bits::mask_below(0x7c00u, magnitude);
  const std::uint32_t special = (magnitude << 13) | 0x7f800000u | quiet;
  const float denormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
  const std::uint32_t finite =
      bits::select(bits::mask_below(magnitude, 0x0400u), std::bit_cast<std::uint32_t>(denormal), normal);
  return std::bit_cast<float>(sign | bits::select(bits::mask_below(magnitude, 0x7c00u), finite, special));
}

UNISONO_INLINE std::uint16_t f32_to_f16(float value) noexcept {
  const std::uint32_t all = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (all >> 16) & 0x8000u;
  const std::uint32_t magnitude = all & 0x7fffffffu;
  // Below 2^-14 the result is a multiple of 2^-24, which is the unit in the last place of numbers in [0.5, 1).
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t denormal = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5f);
  const std::uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const std::uint32_t finite = bits::select(bits::mask_below(magnitude, 0x38800000u), denormal, normal);
  const std::uint32_t is_nan = bits::mask_below(0x7f800000u, magnitude);
  const std::uint32_t special = 0x7c00u | (is_nan & (0x0200u | ((magnitude >> 13) & 0x3ffu)));
  return static_cast<std::uint16_t>(sign | bits::select(bits::mask_below(magnitude, 0x47800000u), finite, special));
}

UNISONO_INLINE float bf16_to_f32(std::uint16_t h) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16);
}

UNISONO_INLINE std::uint16_t f32_to_bf16(float value) noexcept {
  const std::uint32_t all = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (all + 0x7fffu + ((all >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (all >> 16) | 0x40u;
  return static_cast<std::uint16_t>(bits::select(bits::mask_below(0x7f800000u, all & 0x7fffffffu), nan, rounded));
}

#undef UNISONO_INLINE

}  // namespace unisono
