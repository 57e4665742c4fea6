#include <unisono/dtype.h>

namespace unisono {

std::size_t size_of(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::f32:
      return 4;
    case Dtype::f64:
      return 8;
    case Dtype::f16:
      return 2;
    case Dtype::bf16:
      return 2;
    case Dtype::i8:
      return 1;
    case Dtype::u8:
      return 1;
    case Dtype::i32:
      return 4;
    case Dtype::i64:
      return 8;
    case Dtype::boolean:
      return 1;
  }
  return 0;
}

std::string_view to_string(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::f32:
      return "f32";
    case Dtype::f64:
      return "f64";
    case Dtype::f16:
      return "f16";
    case Dtype::bf16:
      return "bf16";
    case Dtype::i8:
      return "i8";
    case Dtype::u8:
      return "u8";
    case Dtype::i32:
      return "i32";
    case Dtype::i64:
      return "i64";
    case Dtype::boolean:
      return "bool";
  }
  return "unknown dtype";
}

std::string_view to_string(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::avg:
      return "avg";
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
    case ReduceOp::product:
      return "product";
    case ReduceOp::bit_and:
      return "bit_and";
    case ReduceOp::bit_or:
      return "bit_or";
    case ReduceOp::bit_xor:
      return "bit_xor";
  }
  return "unknown op";
}

bool is_defined(ReduceOp op, Dtype dtype) noexcept {
  if (size_of(dtype) == 0) return false;
  const bool floating = dtype == Dtype::f32 || dtype == Dtype::f64 || dtype == Dtype::f16 || dtype == Dtype::bf16;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::min:
    case ReduceOp::max:
    case ReduceOp::product:
      return true;
    case ReduceOp::avg:
      return floating;
    case ReduceOp::bit_and:
    case ReduceOp::bit_or:
    case ReduceOp::bit_xor:
      return !floating;
  }
  return false;
}

}  // namespace unisono
