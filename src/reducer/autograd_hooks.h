#pragma once

#include <ATen/core/Tensor.h>
#include <unisono/error.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace unisono {

/// What the reducer hears from autograd. Called on the thread that runs that part of backward: the caller's for CPU
/// gradients, one per device otherwise.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  /// A gradient is about to be accumulated into `.grad` of parameter `index`. Returns what autograd shall accumulate:
  /// `gradient` itself, or an undefined tensor when the listener has already put it where it belongs.
  virtual at::Tensor before_accumulate(std::size_t index, const at::Tensor& gradient) = 0;
  /// Autograd is done with `.grad` of parameter `index`, also when there was no gradient.
  virtual void after_accumulate(std::size_t index) = 0;
  /// `error` is about to leave into autograd. May throw something else in its place.
  virtual void leaving(const Error& error) = 0;
};

/// Hooks on the gradient accumulators of parameters, taken off again at destruction.
/// The accumulator nodes are held, for a parameter itself only keeps a weak reference to its own.
///
/// Node hooks, not tensor hooks: those fire for `autograd::grad` too. And not the post-accumulate slot: there is one
/// per tensor and Python's side and ours would erase each other.
class AutogradHooks {
 public:
  AutogradHooks(const std::vector<at::Tensor>& parameters, GradientListener& listener);
  ~AutogradHooks();
  AutogradHooks(const AutogradHooks&) = delete;
  AutogradHooks& operator=(const AutogradHooks&) = delete;

  /// Which parameters' gradients a backward from `outputs` can reach, one entry per parameter. Walks the whole graph.
  std::vector<bool> reached_from(const std::vector<at::Tensor>& outputs) const;

 private:
  struct Hooked;
  std::vector<Hooked> hooked_;
};

/// Whether some `AutogradHooks` hang on the parameter already.
bool is_hooked(const at::Tensor& parameter);

/// Whether the user has hung a hook on the parameter that runs after accumulation and wants to see `.grad`.
bool has_post_accumulate_hook(const at::Tensor& parameter);

/// The backward that runs on this thread now.
struct BackwardContext {
  int depth = -1;        ///< 0: the outermost; more inside reentrant checkpoints; -1: no backward runs
  std::int64_t id = -1;  ///< grows with every backward, nested ones included
};
BackwardContext current_backward();

/// Runs `done` at the end of the backward that runs on this thread now. When that backward ends by an exception, `done`
/// does not run; it is destroyed before the exception reaches the caller of backward.
void at_end_of_backward(std::function<void()> done);

/// Calls `reached` once, from this thread, when the next node of any backward starts that is less deep than `depth`.
/// The returned handle takes the watch back when it is destroyed.
std::shared_ptr<void> watch_outer_backward(int depth, std::function<void()> reached);

}  // namespace unisono
