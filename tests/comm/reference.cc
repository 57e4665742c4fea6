#include "comm/reference.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace unisono::testing {
namespace {

template <typename T>
T get(const Bytes& bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void put(Bytes& bytes, std::size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

/// n leaves split at the largest power of two below n.
template <typename Leaf, typename Combine>
auto tree(const Leaf& leaf, std::size_t first, std::size_t n, const Combine& combine) -> decltype(leaf(first)) {
  if (n == 1) return leaf(first);
  std::size_t left = 1;
  while (left * 2 < n) left *= 2;
  const auto a = tree(leaf, first, left, combine);
  const auto b = tree(leaf, first + left, n - left, combine);
  return combine(a, b);
}

/// The value closest to |v| of a format with `digits` significant bits and least exponent `least`, ties to even.
double round_to(double v, int digits, int least) {
  if (v == 0 || !std::isfinite(v)) return v;
  int exponent = 0;
  std::frexp(v, &exponent);
  const int unit = std::max(exponent - digits, least);
  return std::ldexp(std::nearbyint(std::ldexp(v, -unit)), unit);
}

std::uint16_t narrow(float value, int exponent_bits, int mantissa_bits, std::uint32_t nan) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const std::uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | nan);
  const int least = 1 - bias - mantissa_bits;
  const double rounded = round_to(std::fabs(static_cast<double>(value)), mantissa_bits + 1, least);
  if (rounded >= std::ldexp(1.0, bias + 1)) return static_cast<std::uint16_t>(sign | infinity);
  if (rounded < std::ldexp(1.0, 1 - bias)) return static_cast<std::uint16_t>(sign + std::ldexp(rounded, -least));
  int exponent = 0;
  const double fraction = std::frexp(rounded, &exponent);  // [0.5, 1)
  const auto mantissa = static_cast<std::uint32_t>(std::ldexp(fraction, mantissa_bits + 1)) - (1u << mantissa_bits);
  return static_cast<std::uint16_t>(sign | (static_cast<std::uint32_t>(exponent - 1 + bias) << mantissa_bits) |
                                    mantissa);
}

float widen(std::uint16_t h, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (h & 0x7fff) >> mantissa_bits;
  const int mantissa = h & ((1 << mantissa_bits) - 1);
  double value = 0;
  if (exponent == (1 << exponent_bits) - 1) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return static_cast<float>(h & 0x8000 ? -value : value);
}

template <typename T>
T combine_floating(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::min:
      return std::isnan(a) || std::isnan(b) ? std::nan("") : (b < a ? b : a);
    case ReduceOp::max:
      return std::isnan(a) || std::isnan(b) ? std::nan("") : (b > a ? b : a);
    case ReduceOp::product:
      return a * b;
    default:
      return a + b;
  }
}

template <typename T>
T combine_integer(ReduceOp op, T a, T b) {
  using U = std::make_unsigned_t<T>;
  using Wide = std::common_type_t<U, unsigned>;
  const Wide ua = static_cast<U>(a), ub = static_cast<U>(b);
  switch (op) {
    case ReduceOp::min:
      return b < a ? b : a;
    case ReduceOp::max:
      return b > a ? b : a;
    case ReduceOp::product:
      return static_cast<T>(static_cast<U>(ua * ub));
    case ReduceOp::bit_and:
      return static_cast<T>(a & b);
    case ReduceOp::bit_or:
      return static_cast<T>(a | b);
    case ReduceOp::bit_xor:
      return static_cast<T>(a ^ b);
    default:
      return static_cast<T>(static_cast<U>(ua + ub));
  }
}

std::uint8_t combine_bool(ReduceOp op, std::uint8_t a, std::uint8_t b) {
  switch (op) {
    case ReduceOp::min:
    case ReduceOp::product:
    case ReduceOp::bit_and:
      return a && b;
    case ReduceOp::bit_xor:
      return !a != !b;
    default:
      return a || b;
  }
}

template <typename Storage, typename T, typename Load, typename Store, typename Combine>
Bytes run(const std::vector<Bytes>& inputs, const Load& load, const Store& store, const Combine& combine) {
  Bytes out(inputs[0].size());
  for (std::size_t i = 0; i < out.size() / sizeof(Storage); ++i) {
    const auto leaf = [&](std::size_t r) -> T { return load(get<Storage>(inputs[r], i)); };
    put<Storage>(out, i, store(tree(leaf, 0, inputs.size(), combine)));
  }
  return out;
}

template <typename Storage, typename T, typename Load, typename Store>
Bytes run_floating(const std::vector<Bytes>& inputs, ReduceOp op, double divisor, const Load& load,
                   const Store& store) {
  const auto finish = [&](T v) {
    if (op == ReduceOp::sum && divisor == 0)
      v = 0;
    else if (op == ReduceOp::sum && divisor != 1)
      v = v / static_cast<T>(divisor);
    return store(std::isnan(v) ? std::numeric_limits<T>::quiet_NaN() : v);
  };
  return run<Storage, T>(inputs, load, finish, [op](T a, T b) { return combine_floating(op, a, b); });
}

template <typename T>
Bytes run_integer(const std::vector<Bytes>& inputs, ReduceOp op) {
  const auto same = [](T v) { return v; };
  return run<T, T>(inputs, same, same, [op](T a, T b) { return combine_integer(op, a, b); });
}

template <typename T, typename Bits>
void put_floating(Bytes& bytes, std::size_t i, std::mt19937_64& random, const std::vector<Bits>& special) {
  const auto dice = random();
  if (dice % 16 == 0) return put(bytes, i, special[(dice >> 8) % special.size()]);
  if (dice % 16 == 1) return put(bytes, i, static_cast<Bits>(random()));
  put(bytes, i, static_cast<T>(std::ldexp(static_cast<double>(random() >> 11), -53) * 8 - 4));
}

std::uint16_t small_f16(std::mt19937_64& random) {
  return narrow_f16(static_cast<float>(std::ldexp(static_cast<double>(random() >> 11), -53) * 8 - 4));
}

void put_small(Bytes& bytes, std::size_t i, std::mt19937_64& random, Dtype dtype) {
  const double value = static_cast<double>(random() % 9) - 4;
  switch (dtype) {
    case Dtype::f32:
      return put(bytes, i, static_cast<float>(value));
    case Dtype::f64:
      return put(bytes, i, value);
    case Dtype::f16:
      return put(bytes, i, narrow_f16(static_cast<float>(value)));
    default:
      return put(bytes, i, narrow_bf16(static_cast<float>(value)));
  }
}

}  // namespace

float widen_f16(std::uint16_t h) { return widen(h, 5, 10); }
std::uint16_t narrow_f16(float value) { return narrow(value, 5, 10, 0x7e00); }
float widen_bf16(std::uint16_t h) { return widen(h, 8, 7); }
std::uint16_t narrow_bf16(float value) { return narrow(value, 8, 7, 0x7fc0); }

double tree_sum(const std::vector<double>& values) {
  const auto leaf = [&](std::size_t r) { return values[r]; };
  return tree(leaf, 0, values.size(), [](double a, double b) { return a + b; });
}

Bytes make_elements(Dtype dtype, std::size_t count, std::uint64_t seed, Numbers numbers) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(dtype));
  Bytes out(count * size_of(dtype));
  const bool floating = dtype == Dtype::f32 || dtype == Dtype::f64 || dtype == Dtype::f16 || dtype == Dtype::bf16;
  for (std::size_t i = 0; i < count; ++i) {
    if (numbers == Numbers::small && floating) {
      put_small(out, i, random, dtype);
      continue;
    }
    switch (dtype) {
      case Dtype::f32:
        put_floating<float, std::uint32_t>(out, i, random,
                                           {0x7f800000u, 0xff800000u, 0x7fc12345u, 0xff800001u, 0u, 0x80000000u, 1u,
                                            0x80000001u, 0x7f7fffffu, 0x00800000u});
        break;
      case Dtype::f64:
        put_floating<double, std::uint64_t>(out, i, random,
                                            {0x7ff0000000000000u, 0xfff0000000000000u, 0x7ff8000000012345u, 0u,
                                             0x8000000000000000u, 1u, 0x7fefffffffffffffu});
        break;
      case Dtype::f16:
      case Dtype::bf16: {
        const auto bits = static_cast<std::uint16_t>(random());
        const bool any = random() % 8 == 0;
        const std::uint16_t small = small_f16(random);
        put(out, i, any ? bits : dtype == Dtype::f16 ? small : narrow_bf16(widen_f16(small)));
        break;
      }
      case Dtype::boolean:
        put(out, i, static_cast<std::uint8_t>(random() & 1));
        break;
      default: {
        const std::uint64_t bits = random();
        std::memcpy(out.data() + i * size_of(dtype), &bits, size_of(dtype));
      }
    }
  }
  return out;
}

Bytes reduce_reference(const std::vector<Bytes>& inputs, Dtype dtype, ReduceOp op, double divisor) {
  if (op == ReduceOp::avg) {
    op = ReduceOp::sum;
    divisor = static_cast<double>(inputs.size());
  }
  const bool divides = op == ReduceOp::sum && divisor != 1 && is_defined(ReduceOp::avg, dtype);
  if (inputs.size() == 1 && !divides) return inputs[0];
  const auto narrow_half = [](float v) { return narrow_f16(v); };
  const auto narrow_bfloat = [](float v) { return narrow_bf16(v); };
  switch (dtype) {
    case Dtype::f32:
      return run_floating<float, float>(inputs, op, divisor, [](float v) { return v; }, [](float v) { return v; });
    case Dtype::f64:
      return run_floating<double, double>(inputs, op, divisor, [](double v) { return v; }, [](double v) { return v; });
    case Dtype::f16:
      return run_floating<std::uint16_t, float>(inputs, op, divisor, widen_f16, narrow_half);
    case Dtype::bf16:
      return run_floating<std::uint16_t, float>(inputs, op, divisor, widen_bf16, narrow_bfloat);
    case Dtype::i8:
      return run_integer<std::int8_t>(inputs, op);
    case Dtype::u8:
      return run_integer<std::uint8_t>(inputs, op);
    case Dtype::i32:
      return run_integer<std::int32_t>(inputs, op);
    case Dtype::i64:
      return run_integer<std::int64_t>(inputs, op);
    case Dtype::boolean: {
      const auto same = [](std::uint8_t v) { return v; };
      return run<std::uint8_t, std::uint8_t>(inputs, same, same,
                                             [op](std::uint8_t a, std::uint8_t b) { return combine_bool(op, a, b); });
    }
  }
  return {};
}

}  // namespace unisono::testing
