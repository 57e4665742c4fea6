#pragma once

#include <bit>
#include <cstdint>

namespace unisono {

// Conversions between f32 and the two 16-bit formats, as integer code without branches, so that loops over them
// become vector code on any machine. Rounding is to nearest, ties to even. A NaN stays a NaN, made quiet, its upper
// payload bits kept. Nothing here depends on whether the thread flushes denormals.

#define UNISONO_INLINE [[gnu::always_inline]] inline

/// *Source*: IEEE 754-2008 binary16: 1 sign bit, 5 exponent bits (bias 15), 10 mantissa bits.
UNISONO_INLINE float f16_to_f32(std::uint16_t h) noexcept {
  const std::uint32_t sign = (h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);  // exponent bias 127 - 15
  const std::uint32_t special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x00400000u : 0u);
  const float denormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
  std::uint32_t bits = magnitude >= 0x7c00u ? special : normal;
  bits = magnitude < 0x0400u ? std::bit_cast<std::uint32_t>(denormal) : bits;
  return std::bit_cast<float>(bits | sign);
}

UNISONO_INLINE std::uint16_t f32_to_f16(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the result is a multiple of 2^-24, which is the unit in the last place of numbers in [0.5, 1).
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t denormal = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5f);
  const std::uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const std::uint32_t special = magnitude > 0x7f800000u ? nan : 0x7c00u;
  std::uint32_t out = magnitude >= 0x47800000u ? special : normal;
  out = magnitude < 0x38800000u ? denormal : out;
  return static_cast<std::uint16_t>(out | sign);
}

UNISONO_INLINE float bf16_to_f32(std::uint16_t h) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16);
}

UNISONO_INLINE std::uint16_t f32_to_bf16(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

#undef UNISONO_INLINE

}  // namespace unisono
