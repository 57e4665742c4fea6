#include "comm/finish_sum.h"

#include <algorithm>
#include <limits>

#include "base/float16.h"

namespace unisono {
namespace {

template <typename T, typename Out, typename Convert>
void finish(const void* wire, const Buffer& out, double divisor, Convert convert) {
  const T* in = static_cast<const T*>(wire);
  Out* to = static_cast<Out*>(out.data);
  if (divisor == 0) {
    std::fill_n(to, out.count, convert(T{0}));
    return;
  }
  const T d = static_cast<T>(divisor);
  for (std::size_t i = 0; i < out.count; ++i) {
    const T quotient = in[i] / d;
    to[i] = convert(quotient == quotient ? quotient : std::numeric_limits<T>::quiet_NaN());
  }
}

}  // namespace

void finish_sum(const void* wire, const Buffer& out, double divisor) {
  switch (out.dtype) {
    case Dtype::f16:
      return finish<float, std::uint16_t>(wire, out, divisor, f32_to_f16);
    case Dtype::bf16:
      return finish<float, std::uint16_t>(wire, out, divisor, f32_to_bf16);
    case Dtype::f32:
      return finish<float, float>(wire, out, divisor, [](float x) { return x; });
    case Dtype::f64:
      return finish<double, double>(wire, out, divisor, [](double x) { return x; });
    default:
      return;
  }
}

}  // namespace unisono
