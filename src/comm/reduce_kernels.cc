#include "comm/reduce_kernels.h"

#include <array>
#include <cstring>

#include "comm/reduce_elements.h"
#include "comm/reduce_kernels_isa.h"

// The elements are cut into blocks that stay in the first-level cache. Of a block, the reduction is computed into the
// first output and copied from there to the others; by then the block's inputs have been read, so an output may be an
// input.
//
// Up to four inputs are reduced in registers in one loop. For more, each group of four (the last may be smaller)
// becomes a partial, and partials are merged as a binary counter adds: two of the same size become one of twice the
// size, and at the end the smallest are merged into the next larger. That is the tree that splits n at the largest
// power of two below n.

namespace unisono {
namespace kernels {

#define UNISONO_INLINE [[gnu::always_inline]] inline

constexpr std::size_t kBlockBytes = 4096;  // of accumulators
constexpr int kMaxLevels = 16;             // partials alive at once: enough for 4 x 2^15 ranks

struct Call {
  const void* const* inputs;
  std::size_t n_inputs;
  void* const* outputs;
  std::size_t n_outputs;
  std::size_t count;
  double divisor;
};

template <typename E, typename Op, bool kDivide>
struct Kernel {
  using S = typename E::Storage;
  using A = typename E::Accumulator;
  static constexpr std::size_t kBlock = kBlockBytes / sizeof(A);

  UNISONO_INLINE static S finish(A v, A divisor) {
    if constexpr (kDivide) v = v / divisor;
    return E::store(v);
  }

  /// out[i] = then(tree of N inputs at i); the loads of an iteration precede its store, and iterations are independent.
  template <int N, typename Out, typename Then>
  UNISONO_INLINE static void loop(const S* const* in, Out* out, std::size_t n, Then then) {
    const S* a = in[0];
    const S* b = N > 1 ? in[1] : a;
    const S* c = N > 2 ? in[2] : a;
    const S* d = N > 3 ? in[3] : a;
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) {
      A v = E::load(a[i]);
      if constexpr (N > 1) v = Op::template apply<A>(v, E::load(b[i]));
      if constexpr (N == 3) v = Op::template apply<A>(v, E::load(c[i]));
      if constexpr (N == 4) v = Op::template apply<A>(v, Op::template apply<A>(E::load(c[i]), E::load(d[i])));
      out[i] = then(v);
    }
  }

  template <typename Out, typename Then>
  UNISONO_INLINE static void loop_any(const S* const* in, std::size_t n_in, Out* out, std::size_t n, Then then) {
    switch (n_in) {
      case 1:
        return loop<1>(in, out, n, then);
      case 2:
        return loop<2>(in, out, n, then);
      case 3:
        return loop<3>(in, out, n, then);
      default:
        return loop<4>(in, out, n, then);
    }
  }

  UNISONO_INLINE static void merge(A* __restrict left, const A* __restrict right, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) left[i] = Op::template apply<A>(left[i], right[i]);
  }

  UNISONO_INLINE static void many(const Call& call, std::size_t begin, S* out, std::size_t n, A divisor) {
    alignas(64) A partial[kMaxLevels][kBlock];
    int top = 0;  // partials alive
    for (std::size_t first = 0, group = 0; first < call.n_inputs; first += 4, ++group) {
      const std::size_t here = call.n_inputs - first < 4 ? call.n_inputs - first : 4;
      const S* in[4] = {};
      for (std::size_t k = 0; k < here; ++k) in[k] = static_cast<const S*>(call.inputs[first + k]) + begin;
      loop_any(in, here, partial[top], n, [](A v) [[gnu::always_inline]] { return v; });
      ++top;
      if (here < 4) break;
      for (std::size_t carry = group; carry & 1; carry >>= 1, --top) merge(partial[top - 2], partial[top - 1], n);
    }
    for (; top > 1; --top) merge(partial[top - 2], partial[top - 1], n);
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) out[i] = finish(partial[0][i], divisor);
  }

  UNISONO_INLINE static void body(const Call& call) {
    const A divisor = static_cast<A>(call.divisor);
    for (std::size_t begin = 0; begin < call.count; begin += kBlock) {
      const std::size_t n = call.count - begin < kBlock ? call.count - begin : kBlock;
      S* out = static_cast<S*>(call.outputs[0]) + begin;
      if (call.n_inputs > 4) {
        many(call, begin, out, n, divisor);
      } else {
        const S* in[4] = {};
        for (std::size_t k = 0; k < call.n_inputs; ++k) in[k] = static_cast<const S*>(call.inputs[k]) + begin;
        loop_any(in, call.n_inputs, out, n, [divisor](A v) [[gnu::always_inline]] { return finish(v, divisor); });
      }
      for (std::size_t k = 1; k < call.n_outputs; ++k) {
        S* copy = static_cast<S*>(call.outputs[k]) + begin;
        if (copy != out) std::memcpy(copy, out, n * sizeof(S));
      }
    }
  }
};

template <typename K>
[[gnu::noinline]] void run_baseline(const Call& call) {
  K::body(call);
}

#if defined(__x86_64__)
template <typename K>
[[gnu::noinline, gnu::target("avx2")]] void run_avx2(const Call& call) {
  K::body(call);
}
#endif

template <typename E, typename Op, bool kDivide = false>
void run(Isa isa, const Call& call) {
#if defined(__x86_64__)
  if (isa == Isa::avx2) return run_avx2<Kernel<E, Op, kDivide>>(call);
#endif
  (void)isa;
  run_baseline<Kernel<E, Op, kDivide>>(call);
}

template <typename E>
void run_floating(Isa isa, const Call& call, ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return run<E, Min>(isa, call);
    case ReduceOp::max:
      return run<E, Max>(isa, call);
    case ReduceOp::product:
      return run<E, Product>(isa, call);
    default:
      return call.divisor == 1 ? run<E, Sum>(isa, call) : run<E, Sum, true>(isa, call);
  }
}

/// Sums and products wrap around; they and the bitwise operations are the same for signed and unsigned.
template <typename Signed, typename Unsigned>
void run_integer(Isa isa, Call call, ReduceOp op, bool is_signed) {
  switch (op) {
    case ReduceOp::min:
      return is_signed ? run<Plain<Signed>, Min>(isa, call) : run<Plain<Unsigned>, Min>(isa, call);
    case ReduceOp::max:
      return is_signed ? run<Plain<Signed>, Max>(isa, call) : run<Plain<Unsigned>, Max>(isa, call);
    case ReduceOp::product:
      return run<Plain<Unsigned>, Product>(isa, call);
    case ReduceOp::bit_and:
      return run<Plain<Unsigned>, And>(isa, call);
    case ReduceOp::bit_or:
      return run<Plain<Unsigned>, Or>(isa, call);
    case ReduceOp::bit_xor:
      return run<Plain<Unsigned>, Xor>(isa, call);
    default:
      return run<Plain<Unsigned>, Sum>(isa, call);
  }
}

void run_bool(Isa isa, const Call& call, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bit_or:
      return run<Bool, Or>(isa, call);
    case ReduceOp::bit_xor:
      return run<Bool, Xor>(isa, call);
    default:
      return run<Bool, And>(isa, call);
  }
}

bool is_floating(Dtype dtype) {
  return dtype == Dtype::f32 || dtype == Dtype::f64 || dtype == Dtype::f16 || dtype == Dtype::bf16;
}

}  // namespace kernels

Isa best_isa() noexcept {
#if defined(__x86_64__)
  static const Isa best = __builtin_cpu_supports("avx2") ? Isa::avx2 : Isa::baseline;
  return best;
#else
  return Isa::baseline;
#endif
}

void tree_reduce_on(Isa isa, std::span<const void* const> inputs, std::span<void* const> outputs, std::size_t count,
                    Dtype dtype, ReduceOp op, double divisor) {
  using namespace kernels;
  if (count == 0 || inputs.empty() || outputs.empty()) return;
  const bool divides = is_floating(dtype) && (op == ReduceOp::sum || op == ReduceOp::avg);
  if (divides && divisor == 0) {
    for (void* out : outputs) std::memset(out, 0, count * size_of(dtype));
    return;
  }
  if (inputs.size() == 1 && !(divides && divisor != 1)) {
    for (void* out : outputs) {
      if (out != inputs[0]) std::memcpy(out, inputs[0], count * size_of(dtype));
    }
    return;
  }
  const Call call{inputs.data(), inputs.size(), outputs.data(), outputs.size(), count, divisor};
  switch (dtype) {
    case Dtype::f32:
      return run_floating<Plain<float>>(isa, call, op);
    case Dtype::f64:
      return run_floating<Plain<double>>(isa, call, op);
    case Dtype::f16:
      return run_floating<Half>(isa, call, op);
    case Dtype::bf16:
      return run_floating<Bfloat>(isa, call, op);
    case Dtype::i8:
      return run_integer<std::int8_t, std::uint8_t>(isa, call, op, true);
    case Dtype::u8:
      return run_integer<std::int8_t, std::uint8_t>(isa, call, op, false);
    case Dtype::i32:
      return run_integer<std::int32_t, std::uint32_t>(isa, call, op, true);
    case Dtype::i64:
      return run_integer<std::int64_t, std::uint64_t>(isa, call, op, true);
    case Dtype::boolean:
      return run_bool(isa, call, op);
  }
}

void tree_reduce(std::span<const void* const> inputs, std::span<void* const> outputs, std::size_t count, Dtype dtype,
                 ReduceOp op, double divisor) {
  tree_reduce_on(best_isa(), inputs, outputs, count, dtype, op, divisor);
}

}  // namespace unisono
