#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <unisono/options.h>
#include <unisono/process_group.h>
#include <unisono/stats.h>

namespace unisono {

/// A tensor of the model under its module path, e.g. "layers.0.weight".
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// What `DistributedDataParallel` does that does not depend on the module's type; the Python wrapper uses it too.
/// *Threads*: one thread at a time, the one that trains; hooks run where autograd runs them.
class DataParallel {
 public:
  /// *Collective*. *Blocks*. Compares names, shapes, dtypes, strides, requires_grad and options over ranks, then takes rank 0's
  /// values, then hooks every parameter that requires grad.
  /// *Throws* `mismatch` with the first entry that differs, the same text on all ranks; `invalid_argument` when no
  /// parameter requires grad or one that does cannot be reduced.
  DataParallel(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
               std::shared_ptr<ProcessGroup> group, const DistributedDataParallelOptions& options);
  ~DataParallel();
  DataParallel(DataParallel&&) noexcept;
  DataParallel& operator=(DataParallel&&) noexcept;

  /// To be called before each forward: brings rank 0's buffers when a synchronisation has happened since the last time
  /// and gradients are being recorded. *Collective* in that case. `buffers` are the module's buffers as they are now.
  void before_forward(const std::vector<NamedTensor>& buffers);
  /// Whether `before_forward` has anything to do; lets wrappers skip listing buffers.
  bool wants_buffers() const;

  /// To be called after each forward when `wants_outputs()` (find_unused_parameters): the tensors forward returned. Walks
  /// their graph, so that buckets do not wait for parameters that the coming backward cannot reach. Local.
  void after_forward(const std::vector<at::Tensor>& outputs);
  bool wants_outputs() const;

  /// Whether gradients have been accumulated under no_sync that no synchronisation has averaged yet. An optimizer that steps
  /// on them lets the replicas drift apart.
  bool has_unsynchronised_gradients() const;

  /// Whether the next gradient hooks synchronise. Read when a hook fires, not in forward.
  void set_sync(bool on);
  bool sync() const;

  /// The loss of a mean over `n` samples (tokens, ...) made ready for a true average: the gradients become those of the
  /// mean over the union of all ranks' (and accumulated micro-batches') samples. n may be 0 on a rank.
  at::Tensor weight(const at::Tensor& mean_loss, double n);

  /// Synchronises gradients accumulated under no_sync now, without a backward. *Collective*. *Blocks*.
  void sync_grads();

  /// Digest (SHA-256, hex) of the bits of all parameters and buffers, in order. Local.
  std::string digest() const;
  /// Whether all ranks have the same digest. Rank 0's buffers are brought first when they are due, as before a forward: running
  /// statistics differ until then. *Collective*. *Blocks*.
  bool replicas_identical();

  const StepStats& last_step() const;
  void set_tracing(bool on);
  /// Events since tracing began or since the last call.
  std::vector<TraceEvent> take_trace();
  /// Sizes in bytes of the buckets of the present plan, in launch order.
  std::vector<std::int64_t> bucket_sizes() const;

  const std::shared_ptr<ProcessGroup>& group() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The tensors in what a forward returned, as far as its type shows them: a tensor, tuples, pairs and vectors of what has
/// tensors, dictionaries' values. Give `find_unused_parameters` an overload for a type of your own, found by its namespace.
inline void collect_tensors(const at::Tensor& value, std::vector<at::Tensor>& into) { into.push_back(value); }
template <typename T>
void collect_tensors(const T& value, std::vector<at::Tensor>& into) {
  if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... items) { (collect_tensors(items, into), ...); }, value);
  } else if constexpr (requires { value.begin()->second; }) {
    for (const auto& item : value) collect_tensors(item.second, into);
  } else if constexpr (requires { value.begin(); value.end(); typename T::value_type; }) {
    if constexpr (!std::is_arithmetic_v<typename T::value_type>) {
      for (const auto& item : value) collect_tensors(item, into);
    }
  }
}
template <typename T>
std::vector<at::Tensor> tensors_in(const T& value) {
  std::vector<at::Tensor> tensors;
  collect_tensors(value, tensors);
  return tensors;
}

/// While it lives, backwards accumulate locally and nothing is sent.
class NoSync {
 public:
  explicit NoSync(DataParallel& ddp, bool enabled = true) : ddp_(&ddp), before_(ddp.sync()) {
    if (enabled) ddp.set_sync(false);
  }
  ~NoSync() { ddp_->set_sync(before_); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  DataParallel* ddp_;
  bool before_;
};

/// Keeps the replicas of `module` on all ranks of `group` in step: after every backward, `.grad` of every parameter is the
/// mean over ranks, bit for bit the same on all of them. Forward may take and return anything.
/// *Source*: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704.
template <std::derived_from<torch::nn::Module> M>
class DistributedDataParallel {
 public:
  using Options = DistributedDataParallelOptions;

  DistributedDataParallel(std::shared_ptr<M> module, std::shared_ptr<ProcessGroup> group, const Options& options = {})
      : module_(std::move(module)), core_(parameters_of(*module_), buffers_of(*module_), std::move(group), options) {}
  DistributedDataParallel(const torch::nn::ModuleHolder<M>& holder, std::shared_ptr<ProcessGroup> group,
                          const Options& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}
  /// The module must outlive the wrapper.
  DistributedDataParallel(M& module, std::shared_ptr<ProcessGroup> group, const Options& options = {})
      : DistributedDataParallel(std::shared_ptr<M>(std::shared_ptr<void>(), &module), std::move(group), options) {}

  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    if (core_.wants_buffers()) core_.before_forward(buffers_of(*module_));
    if constexpr (std::is_void_v<decltype(module_->forward(std::forward<Args>(args)...))>) {
      module_->forward(std::forward<Args>(args)...);
    } else {
      decltype(auto) output = module_->forward(std::forward<Args>(args)...);
      if (core_.wants_outputs()) core_.after_forward(tensors_in(output));
      return output;
    }
  }
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  M& module() { return *module_; }
  M* operator->() { return module_.get(); }

  [[nodiscard]] NoSync no_sync(bool enabled = true) { return NoSync(core_, enabled); }
  at::Tensor weight(const at::Tensor& mean_loss, double n) { return core_.weight(mean_loss, n); }
  void sync_grads() { core_.sync_grads(); }
  bool has_unsynchronised_gradients() const { return core_.has_unsynchronised_gradients(); }
  std::string digest() const { return core_.digest(); }
  bool replicas_identical() { return core_.replicas_identical(); }
  const StepStats& last_step() const { return core_.last_step(); }
  /// The part that does not depend on M: tracing, bucket sizes, the group.
  DataParallel& core() { return core_; }

 private:
  static std::vector<NamedTensor> parameters_of(const M& module) {
    std::vector<NamedTensor> out;
    for (const auto& p : module.named_parameters()) out.push_back({p.key(), p.value()});
    return out;
  }
  static std::vector<NamedTensor> buffers_of(const M& module) {
    std::vector<NamedTensor> out;
    for (const auto& b : module.named_buffers()) out.push_back({b.key(), b.value()});
    return out;
  }

  std::shared_ptr<M> module_;
  DataParallel core_;
};

}  // namespace unisono
