#pragma once

#include <unisono/named_tensor.h>
#include <unisono/process_group.h>

#include <coroutine>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace unisono {

/// A bucket as a transform sees it. Counts and weights are not in it: they travel beside the data.
struct GradientBucket {
  int index = 0;
  bool is_last = false;
  std::int64_t step = 0;
  at::Tensor buffer;  ///< flat; the gradients one after the other, zeros between them; complex as two reals
  std::vector<NamedTensor> gradients;  ///< views into it, in the shapes of their parameters
  std::vector<at::Tensor> parameters;  ///< in the same order
};

/// What a transform sends through: collectives of the bucket's group on ordinary tensors, counted.
/// The order of calls must be the same on all ranks.
class GradientChannel {
 public:
  GradientChannel(ProcessGroup& group, CallTag tag) : group_(group), tag_(tag) {}
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  ProcessGroup& group() { return group_; }

  /// In place; `tensor` contiguous. f16 and bf16 are summed in f32 and rounded once where the transport is ours.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum);
  /// `out` holds size() times `in`; both contiguous.
  Work all_gather(const at::Tensor& out, const at::Tensor& in);
  /// Bytes this rank has handed to collectives, and how many there were.
  std::size_t bytes() const { return bytes_; }
  int messages() const { return messages_; }

 private:
  ProcessGroup& group_;
  CallTag tag_;
  std::size_t bytes_ = 0;
  int messages_ = 0;
};

/// A transform at work on one bucket: a coroutine that suspends at each `co_await work` until the reducer goes on with
/// it.
class TransformTask {
 public:
  struct promise_type {
    TransformTask get_return_object() {
      return TransformTask(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_never initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
    auto await_transform(Work work) {
      waits_for = std::move(work);
      return std::suspend_always{};
    }
    Work waits_for;
    std::exception_ptr error;
  };

  TransformTask(TransformTask&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  TransformTask& operator=(TransformTask&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~TransformTask() {
    if (handle_) handle_.destroy();
  }

  bool done() const { return handle_.done(); }
  /// Waits for the collective under way and runs to the next, or to the end. *Throws* what the collective or the
  /// transform threw.
  void advance() {
    if (!handle_.done()) {
      handle_.promise().waits_for.wait();
      handle_.resume();
    }
    rethrow();
  }
  void rethrow() const {
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
  }

 private:
  explicit TransformTask(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  std::coroutine_handle<promise_type> handle_;
};

/// How a bucket travels instead of in one all-reduce of its own bits: compressed, in parts, or not at all.
///
/// `run` is started on every rank for every bucket in the same order. A transform of one round of collectives is
/// resumed when backward has ended; of one with more rounds, each bucket goes one round further whenever a later bucket
/// starts, and the rest at the end: the collectives' order is the same on all ranks whatever their timing.
/// An exception that leaves `run` on one rank ends the group on all, naming it.
/// *Threads*: called where gradient hooks run, one call at a time.
class GradientTransform {
 public:
  /// What `bucket.buffer` holds at the end: over ranks, the mean of what they gave, or the sum. The reducer does the
  /// rest, weights included.
  enum class Yields { mean, sum };

  virtual ~GradientTransform() = default;
  virtual std::string name() const = 0;
  virtual Yields yields() const { return Yields::mean; }
  virtual int rounds() const { return 1; }
  /// Whether all ranks end with the same bits in `bucket.buffer`; where not, replicas are not compared.
  virtual bool keeps_replicas_equal() const { return true; }
  virtual TransformTask run(GradientBucket bucket, GradientChannel& channel) = 0;

  /// What a checkpoint must hold to go on with the same numbers; local to this rank.
  virtual std::vector<NamedTensor> state() const { return {}; }
  /// *Throws* `invalid_argument` for a state that is not this transform's.
  virtual void load_state(const std::vector<NamedTensor>& state);
};

}  // namespace unisono
