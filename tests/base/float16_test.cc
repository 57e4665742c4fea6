#include "base/float16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "comm/reference.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono::testing {
namespace {

std::uint32_t bits_of(float v) { return std::bit_cast<std::uint32_t>(v); }

TEST(Float16, WideningIsExactForAllValues) {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    for (auto [actual, expected] :
         {std::pair{f16_to_f32(half), widen_f16(half)}, std::pair{bf16_to_f32(half), widen_bf16(half)}}) {
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(actual)) << h;
        ASSERT_EQ(h >> 15, bits_of(actual) >> 31) << h;
      } else {
        ASSERT_EQ(bits_of(expected), bits_of(actual)) << h;
      }
    }
  }
}

TEST(Float16, RoundTripKeepsAllValues) {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    const bool f16_nan = (h & 0x7fff) > 0x7c00, bf16_nan = (h & 0x7fff) > 0x7f80;
    ASSERT_EQ(f16_nan ? h | 0x0200 : h, f32_to_f16(f16_to_f32(half)));
    ASSERT_EQ(bf16_nan ? h | 0x0040 : h, f32_to_bf16(bf16_to_f32(half)));
  }
}

void expect_narrow(float v) {
  const auto nan_bits = bits_of(v);
  if (std::isnan(v)) {
    ASSERT_EQ(((nan_bits >> 16) & 0x8000) | 0x7e00 | ((nan_bits >> 13) & 0x3ff), f32_to_f16(v));
    ASSERT_EQ((nan_bits >> 16) | 0x40, f32_to_bf16(v));
  } else {
    ASSERT_EQ(narrow_f16(v), f32_to_f16(v)) << std::hexfloat << v;
    ASSERT_EQ(narrow_bf16(v), f32_to_bf16(v)) << std::hexfloat << v;
  }
}

/// Around every 16-bit value: itself, the middle to the next one, and a hair on either side of the middle.
TEST(Float16, RoundsToNearestTiesToEven) {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    for (std::uint32_t base : {bits_of(f16_to_f32(half)), bits_of(bf16_to_f32(half))}) {
      for (std::uint32_t offset : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
        expect_narrow(std::bit_cast<float>(base + offset));
        if (HasFatalFailure()) return;
      }
    }
  }
  for (float v :
       {65519.99f, 65520.0f, 65536.0f, 0x1p-25f, 0x1.000002p-25f, 0x1p-24f, 0x1.8p-24f, 0x1.ffep-15f, 3.4e38f}) {
    expect_narrow(v);
    expect_narrow(-v);
  }
}

TEST(Float16, RandomBits) {
  std::mt19937 random(1);
  for (int i = 0; i < 300000 && !HasFatalFailure(); ++i)
    expect_narrow(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
}

#if defined(__x86_64__)
[[gnu::target("f16c")]] void compare_with_f16c() {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    ASSERT_EQ(bits_of(_cvtsh_ss(half)), bits_of(f16_to_f32(half))) << h;
  }
  std::mt19937 random(2);
  for (int i = 0; i < 300000; ++i) {
    const float v = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    ASSERT_EQ(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT), f32_to_f16(v)) << std::hexfloat << v;
  }
}

TEST(Float16, SameAsTheHardware) {
  if (!__builtin_cpu_supports("f16c")) GTEST_SKIP() << "this machine has no F16C";
  compare_with_f16c();
}
#endif

}  // namespace
}  // namespace unisono::testing
