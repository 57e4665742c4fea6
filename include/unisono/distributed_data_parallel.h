#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <unisono/gradient_transform.h>
#include <unisono/named_tensor.h>
#include <unisono/options.h>
#include <unisono/process_group.h>
#include <unisono/stats.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace unisono {

/// How a join treats ranks that have run out of inputs. The same on all ranks.
struct JoinOptions {
  bool divide_by_initial_world_size = true;  ///< false: averages are over the ranks that still have inputs
  bool throw_on_early_termination = false;   ///< the first rank without inputs makes that step throw on every rank
};

/// How optimizers step inside backward. The same on all ranks.
struct StepInBackwardOptions {
  /// The gradients' common 2-norm is clipped to it (infinity: as they are); the steps are then taken at the end of the
  /// backward.
  std::optional<double> max_norm = std::nullopt;
  /// The backward returns when the last bucket has left, and each parameter's step is taken before the next operator
  /// that reads it, usually in the next forward. Over a slow link the first layers' buckets are served first. For
  /// groups whose calls go on in the background; not with `max_norm`, a gradient transform or sparse gradients. Inside
  /// a join it is as if it were off.
  bool overlap_forward = false;
  /// With `overlap_forward`: called with true when a backward returns with steps left to take, to remember what must
  /// not change until then (a learning rate), and with false when none is left.
  std::function<void(bool)> steps_left = nullptr;
};

/// What `DistributedDataParallel` does that does not depend on the module's type; the Python wrapper uses it too.
/// *Threads*: one thread at a time, the one that trains; hooks run where autograd runs them.
class DataParallel {
 public:
  /// *Collective*. *Blocks*. Compares names, shapes, dtypes, strides, requires_grad and options over ranks, then takes
  /// rank 0's values, then hooks every parameter that requires grad.
  /// *Throws* `mismatch` with the first entry that differs, the same text on all ranks; `invalid_argument` when no
  /// parameter requires grad or one that does cannot be reduced.
  DataParallel(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
               std::shared_ptr<ProcessGroup> group, const DistributedDataParallelOptions& options);
  ~DataParallel();
  DataParallel(DataParallel&&) noexcept;
  DataParallel& operator=(DataParallel&&) noexcept;

  /// Whether a parameter that was wrapped has been frozen, unfrozen or converted since. Local and cheap.
  bool parameters_changed() const;
  /// ... or one was added to the module, removed or replaced.
  bool module_changed(const torch::nn::Module& module) const;
  /// To be called before a forward when something changed: from here on these are the model's parameters and buffers.
  /// New ones get rank 0's values. Does nothing when all is as it was. *Collective*, *blocks*.
  /// *Throws* `mismatch` when the ranks' models differ now, `invalid_argument` when gradients accumulated under no_sync
  /// wait for their synchronisation.
  void follow(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers);

  /// Goes on with another group, of other ranks perhaps, after the old one has failed or to take in new ranks: what the
  /// constructor does, in a wrapper that lives, with the module's parameters and buffers as they are now. All ranks
  /// get those of rank 0, gradients become undefined, steps are counted from 0. A transform, an optimizer in backward
  /// and a buffer hook stay; what state they have, and the optimizer's, is the caller's to bring to all ranks. When it
  /// throws, call it again with another group. *Collective* over the new group; newcomers construct their wrapper
  /// meanwhile. *Blocks*.
  /// *Throws* as the constructor.
  void set_group(std::shared_ptr<ProcessGroup> group, std::vector<NamedTensor> parameters,
                 std::vector<NamedTensor> buffers);

  /// To be called before each forward of a module in training mode: brings the buffers of all ranks to one state, by
  /// `buffer_policy` or the hook, when a synchronisation has happened since the last time and gradients are being
  /// recorded. *Collective* in that case. `buffers` are the module's buffers as they are now, reassigned or resized
  /// ones included.
  /// *Throws* `mismatch` on all ranks, naming the first buffer whose name, shape or dtype differs; the group stays
  /// usable.
  void before_forward(const std::vector<NamedTensor>& buffers);
  /// Whether `before_forward` has anything to do; lets wrappers skip listing buffers.
  bool wants_buffers() const;

  /// Brings the buffers of all ranks to one state now, due or not, `broadcast_buffers` or not: after it every rank may
  /// save or evaluate, and `replicas_identical()` holds. Parameters are left alone. *Collective*. *Blocks*. *Throws* as
  /// above.
  void sync_state(const std::vector<NamedTensor>& buffers);

  /// Takes the place of `buffer_policy`, with the buffers that are not ignored. It may run any collectives on the
  /// group, the same ones on all ranks, and must leave the buffers alike on all ranks. Called by the training thread
  /// before a forward and by `sync_state`; not in a world of one. Null: the policy again.
  using BufferHook = std::function<void(const std::vector<NamedTensor>&, ProcessGroup&)>;
  void set_buffer_hook(BufferHook hook);

  /// Tells which tensors the module's buffers are now: a forward may have assigned others. To be called before
  /// `finish_join`. Local.
  void follow_buffers(const std::vector<NamedTensor>& buffers);

  /// To be called after each forward when `wants_outputs()` (find_unused_parameters): the tensors forward returned.
  /// Walks their graph, so that buckets do not wait for parameters that the coming backward cannot reach. Local.
  void after_forward(const std::vector<at::Tensor>& outputs);
  bool wants_outputs() const;

  /// Whether gradients have been accumulated under no_sync that no synchronisation has averaged yet. An optimizer that
  /// steps on them lets the replicas drift apart.
  bool has_unsynchronised_gradients() const;
  /// *Throws* `invalid_argument` when it does.
  void require_synchronised() const;

  /// Whether the next gradient hooks synchronise. Read when a hook fires, not in forward.
  void set_sync(bool on);
  bool sync() const;

  /// The loss of a mean over `n` samples (tokens, ...) made ready for a true average: the gradients become those of the
  /// mean over the union of all ranks' (and accumulated micro-batches') samples. n may be 0 on a rank.
  at::Tensor weight(const at::Tensor& mean_loss, double n);

  /// Synchronises gradients accumulated under no_sync now, without a backward. *Collective*. *Blocks*.
  void sync_grads();

  /// Gradients travel through `transform` from the next backward on; null: as they are. The same on all ranks, before a
  /// step's first backward. See gradient_transform.h and transforms.h.
  void set_transform(std::shared_ptr<GradientTransform> transform);
  std::shared_ptr<GradientTransform> transform() const;

  /// From the next backward on, `update` gets parameters as soon as their gradients are averaged, and must use the
  /// gradients up and leave them undefined. It runs inside backward, bucket by bucket, or, with `max_norm`, a gradient
  /// transform, or for sparse gradients, at its end, or, with `overlap_forward`, where the parameters are used next.
  /// *Throws* `invalid_argument` when a parameter has a post-accumulate hook; a backward throws it, naming the
  /// parameter, when a gradient comes after its bucket's step.
  void set_step_in_backward(std::function<void(const std::vector<NamedTensor>&)> update,
                            StepInBackwardOptions options = {});
  /// Takes the steps that `overlap_forward` has left. *Blocks*. *Throws* what went wrong in them. Not collective. Every
  /// other call that needs them does it by itself.
  void finish_step() const;
  /// To be called after each forward: *throws* what went wrong in steps that were taken inside it. Local.
  void check_step() const;

  /// From here to `finish_join` ranks may have different numbers of steps. No message is sent for it: a rank in
  /// `finish_join` takes part in the others' steps with nothing, and they learn of it from the message that ends each
  /// backward.
  /// *Throws* `invalid_argument` inside a join or while gradients are being accumulated.
  void begin_join(const JoinOptions& options = {});
  /// This rank has no more inputs. *Blocks* until no rank has; then all ranks have the parameters and buffers of the
  /// lowest of those that took the last step. *Collective*. A collective of the user's own that the others call
  /// meanwhile is a `mismatch` naming both.
  void finish_join();
  /// Ends the join on this rank alone, after an exception.
  void cancel_join();

  /// Digest (SHA-256, hex) of the bits of the module's parameters and buffers as they are now, in order, without the
  /// ignored ones. Local.
  std::string digest(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers) const;
  /// Whether all ranks have the same digest. Buffers are brought first when they are due, as before a forward: running
  /// statistics differ until then. *Collective*. *Blocks*.
  bool replicas_identical(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers);

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

/// `options` with the parameters of the module's sparse embeddings among `sparse_parameters`.
DistributedDataParallelOptions with_sparse_parameters(DistributedDataParallelOptions options,
                                                      const torch::nn::Module& module);

/// The SyncBatchNorm layers of `module` that run over the group `from` run over `to` from now on.
void give_layers_group(torch::nn::Module& module, const ProcessGroup& from, const std::shared_ptr<ProcessGroup>& to);

/// The tensors in what a forward returned, as far as its type shows them: a tensor, tuples, pairs and vectors of what
/// has tensors, dictionaries' values. Give `find_unused_parameters` an overload for a type of your own, found by its
/// namespace.
inline void collect_tensors(const at::Tensor& value, std::vector<at::Tensor>& into) { into.push_back(value); }
template <typename T>
void collect_tensors(const T& value, std::vector<at::Tensor>& into) {
  if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... items) { (collect_tensors(items, into), ...); }, value);
  } else if constexpr (requires { value.begin()->second; }) {
    for (const auto& item : value) collect_tensors(item.second, into);
  } else if constexpr (requires {
                         value.begin();
                         value.end();
                         typename T::value_type;
                       }) {
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

/// Keeps the replicas of `module` on all ranks of `group` in step: after every backward, `.grad` of every parameter is
/// the mean over ranks, bit for bit the same on all of them. Forward may take and return anything.
/// *Source*: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704.
template <std::derived_from<torch::nn::Module> M>
class DistributedDataParallel {
 public:
  using Options = DistributedDataParallelOptions;

  DistributedDataParallel(std::shared_ptr<M> module, std::shared_ptr<ProcessGroup> group, const Options& options = {})
      : module_(std::move(module)),
        core_(parameters_of(*module_), buffers_of(*module_), std::move(group),
              with_sparse_parameters(options, *module_)) {
    core_.module_changed(*module_);  // what comes later is compared with it
  }
  DistributedDataParallel(const torch::nn::ModuleHolder<M>& holder, std::shared_ptr<ProcessGroup> group,
                          const Options& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}
  /// The module must outlive the wrapper.
  DistributedDataParallel(M& module, std::shared_ptr<ProcessGroup> group, const Options& options = {})
      : DistributedDataParallel(std::shared_ptr<M>(std::shared_ptr<void>(), &module), std::move(group), options) {}

  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    if (core_.module_changed(*module_)) core_.follow(parameters_of(*module_), buffers_of(*module_));
    if (module_->is_training() && core_.wants_buffers()) core_.before_forward(buffers_of(*module_));
    if constexpr (std::is_void_v<decltype(module_->forward(std::forward<Args>(args)...))>) {
      module_->forward(std::forward<Args>(args)...);
      core_.check_step();
    } else {
      decltype(auto) output = module_->forward(std::forward<Args>(args)...);
      core_.check_step();
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
  /// `optimizer.step()`, guarded. *Throws* `invalid_argument` when gradients have been accumulated under no_sync that
  /// no synchronisation has averaged: each rank would step on its own. (Python's wrapper guards every optimizer by
  /// itself.)
  template <typename Optimizer>
  void step(Optimizer& optimizer) {
    core_.require_synchronised();
    optimizer.step();
  }
  /// Runs `steps`, of which ranks may take different numbers; see DataParallel::begin_join.
  template <typename Steps>
  void join(Steps steps, const JoinOptions& options = {}) {
    core_.begin_join(options);
    try {
      steps();
    } catch (...) {
      core_.cancel_join();
      throw;
    }
    core_.follow_buffers(buffers_of(*module_));
    core_.finish_join();
  }
  /// Optimizers that step inside backward, one per parameter: `make` gets a vector of one parameter and returns a
  /// unique_ptr to its optimizer, e.g. std::make_unique<torch::optim::SGD>(parameters, 0.1). A parameter that takes
  /// another's place gets an optimizer of its own. See DataParallel::set_step_in_backward.
  template <typename Make>
  void step_in_backward(Make make, StepInBackwardOptions options = {}) {
    using Optimizer = decltype(make(std::vector<at::Tensor>{}));
    struct Stepped {
      at::Tensor parameter;
      Optimizer optimizer;
    };
    auto optimizers = std::make_shared<std::map<std::string, Stepped>>();
    core_.set_step_in_backward(
        [make, optimizers](const std::vector<NamedTensor>& parameters) {
          for (const NamedTensor& p : parameters) {
            Stepped& its = (*optimizers)[p.name];
            if (!its.parameter.is_same(p.tensor)) its = {p.tensor, make(std::vector<at::Tensor>{p.tensor})};
            its.optimizer->step();
            p.tensor.mutable_grad().reset();
          }
        },
        std::move(options));
  }
  void finish_step() { core_.finish_step(); }
  /// Goes on with another group, and with it the module's SyncBatchNorm layers that had the old one; see
  /// DataParallel::set_group.
  void set_group(std::shared_ptr<ProcessGroup> group) {
    const auto before = core_.group();
    core_.set_group(group, parameters_of(*module_), buffers_of(*module_));
    give_layers_group(*module_, *before, group);
  }
  /// Before saving or evaluating: brings the buffers of all ranks to one state. *Collective*. *Blocks*.
  void sync_state() { core_.sync_state(buffers_of(*module_)); }
  void set_buffer_hook(DataParallel::BufferHook hook) { core_.set_buffer_hook(std::move(hook)); }
  std::string digest() { return core_.digest(parameters_of(*module_), buffers_of(*module_)); }
  bool replicas_identical() { return core_.replicas_identical(parameters_of(*module_), buffers_of(*module_)); }
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
