#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace unisono {

/// While it lives, `used(i)` is called before an operator gets a tensor in the memory of `tensors[i]`, views and
/// aliases included: on the thread that runs the operator, inside the dispatcher. Operators that `used` itself runs are
/// not looked at. What reads memory without an operator (a raw pointer, a compiled kernel) is not seen. `used` must not
/// throw: torch would print the exception and go on. *Threads*: any; several may be in `used` at once.
class TensorWatch {
 public:
  TensorWatch(const std::vector<at::Tensor>& tensors, std::function<void(std::size_t)> used);
  ~TensorWatch();
  TensorWatch(const TensorWatch&) = delete;
  TensorWatch& operator=(const TensorWatch&) = delete;

  struct State;

 private:
  std::shared_ptr<State> state_;
  std::uint64_t handle_;
};

}  // namespace unisono
