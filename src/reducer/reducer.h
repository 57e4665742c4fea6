#pragma once

#include <ATen/ThreadLocalState.h>
#include <unisono/distributed_data_parallel.h>
#include <unisono/process_group.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "reducer/autograd_hooks.h"
#include "reducer/backward_message.h"
#include "reducer/buckets.h"
#include "reducer/launcher.h"
#include "reducer/ready_order.h"
#include "reducer/tensor_watch.h"
#include "reducer/timeline.h"

namespace unisono {

/// Averages gradients over ranks while backward runs.
///
/// A backward is `idle` until the first gradient hook fires. With synchronisation on it is then `reducing`: every hook
/// that fires counts its bucket down, buckets leave in plan order, and the end of the outermost backward sends the last
/// one, waits, and settles what the ranks said happened. Where steps are left to the next forward it does not wait: the
/// reducer is `draining` until every parameter has been used again, or somebody asks for the rest. With synchronisation
/// off it is `local`: gradients accumulate. A *window* is everything since the last synchronisation: local backwards
/// and the reducing one that closes it.
///
/// *Threads*: hooks run where autograd runs them, under one lock. Everything else: the training thread.
class Reducer final : public GradientListener {
 public:
  struct Options {
    BucketCaps caps;
    bool overlap = true;
    bool as_view = true;
    bool strict = false;
    bool uneven_accumulation = false;
    bool check_finite = false;
    bool check_replicas = false;
    std::optional<at::ScalarType> travels_as = std::nullopt;
    std::int64_t first_step = 0;
    int user = 0;                          // see ProcessGroup::number_user
    std::vector<NamedTensor> frozen = {};  // the model's other parameters: must not require grad in a backward
    std::vector<bool> sparse = {};         // per parameter; empty: none
    std::vector<bool> delayed = {};        // likewise: in the last buckets
    std::function<void(const Error&)> rethrow = nullptr;  // may throw another exception in an error's place
  };

  /// *Collective* (allocates buckets). `parameters` all require grad.
  Reducer(const std::vector<NamedTensor>& parameters, std::shared_ptr<ProcessGroup> group, const Options& options);
  ~Reducer() override;

  void set_sync(bool on) { sync_ = on; }
  bool sync() const { return sync_; }
  at::Tensor weight(const at::Tensor& mean_loss, double n);
  void sync_grads();
  /// The next backward starts from `outputs`: walks their graph, so that buckets do not wait for what it cannot reach.
  void expect_backward_from(const std::vector<at::Tensor>& outputs);
  /// Whether gradients have been accumulated that no synchronisation has averaged.
  bool has_unsynchronised() const;

  std::int64_t step() const { return step_; }
  /// Ranks may run out of inputs from now on: those that have call `shadow_step` until it returns false. `by_active`:
  /// averages are over the ranks that still have inputs. `end_early`: the first rank without inputs makes every rank's
  /// backward throw.
  void begin_join(bool by_active, bool end_early);
  void end_join();
  /// Goes on with the join of the reducer in whose place this one comes.
  void continue_join(const Reducer& before);
  /// Takes part in one step of the others without data. Returns false when no rank had data. *Collective*. *Blocks*.
  bool shadow_step();
  /// The lowest rank that had inputs in the last step.
  int authority() const { return authority_; }

  /// How many synchronisations have ended well.
  std::int64_t synchronisations() const { return synchronisations_; }
  /// Sends buckets through `transform` from the next backward on; null: in all-reduces of their own. Not inside a
  /// window.
  void set_transform(std::shared_ptr<GradientTransform> transform);
  /// See DataParallel::set_step_in_backward. Null ends it.
  using Update = std::function<void(const std::vector<NamedTensor>&)>;
  void set_update(Update update, StepInBackwardOptions options);
  /// Takes the steps that were left to the forward. *Blocks*. *Throws* what went wrong in them.
  void finish_step();
  /// *Throws* what went wrong in steps taken since the last call, if anything did.
  void check_step();
  const std::shared_ptr<GradientTransform>& transform() { return launcher_.pipeline().transform(); }
  Timeline& timeline() { return timeline_; }
  std::vector<std::int64_t> bucket_sizes() const;

  at::Tensor before_accumulate(std::size_t index, const at::Tensor& gradient) override;
  void after_accumulate(std::size_t index) override;
  void leaving(const Error& error) override;

 private:
  enum class Phase { idle, local, reducing, draining };
  class Ending;  // queued at the end of a backward; tells a good end from an exception

  // The one place where the phase changes.
  enum class Event { first_hook, by_hand, leave_rest, end, failure };
  void transition(Event event);

  void enter();  // a hook fires: arms, or follows a backward to its outer one
  void arm(const BackwardContext& context);
  void queue_end(const BackwardContext& context);
  void reached_end(std::int64_t backward, int depth);
  void abandon(std::int64_t backward) noexcept;

  void begin_backward();
  void weigh(double n);  // the backward of a weighted loss runs
  void forget_pending_weight(std::int64_t pending);
  void commit_weight();
  void watch_window();
  // Whether a backward is under way or gradients wait for their synchronisation, those thrown away forgotten.
  bool is_accumulating();
  void remember_versions();
  [[noreturn]] void refuse_mixed_weights() const;
  void check_frozen() const;
  void reduce_by_hand();   // a synchronisation without a backward
  void begin_reduction();  // every bucket expects its gradients again
  void mark_ready(std::size_t index);
  void launch_next(bool withhold);
  void give_to_transform();
  ControlRecord closing_record();
  bool updates_early() const { return update_ && !update_options_.max_norm && !launcher_.transforms(); }
  bool overlaps_forward() const { return update_ && update_options_.overlap_forward && !by_hand_ && !join_.on; }
  void require_overlappable(const StepInBackwardOptions& options, bool transforms) const;
  void leave_rest_to_forward();
  void used(std::size_t watched);  // an operator is about to get a parameter, or a bucket's memory
  void drain();
  void raise_late_error();
  void bucket_ended(std::size_t index);
  void update_rest(const BackwardMessage& verdict);
  void note_nonfinite(const Bucket& bucket);
  void check_verdict(const BackwardMessage& verdict) const;
  void report(const BackwardMessage& verdict) const;
  void follow_joined(const BackwardMessage& verdict);
  void check_accumulation(const BackwardMessage& verdict) const;
  void check_replicas(const BackwardMessage& verdict) const;
  [[noreturn]] void name_first_difference() const;
  void finish_reduction();
  void complete_reduction();
  void fail_reduction();
  void reduce_late(const BackwardMessage& verdict);
  void reduce_sparse(const BackwardMessage& verdict);
  void settle(const BackwardMessage& verdict);
  void close_window();
  void rebuild();
  std::vector<BucketSpec> plan() const;
  std::string names_of(const Bitmap& set) const;
  std::string describe_bucket(std::size_t index) const;

  // Fixed.
  std::shared_ptr<ProcessGroup> group_;
  const Options options_;
  std::vector<GradientSlot> slots_;
  std::vector<at::Tensor> parameters_;
  bool all_views_ = true;  // every `.grad` lies in its bucket

  Update update_;
  StepInBackwardOptions update_options_;

  // Of the plan.
  std::unique_ptr<Buckets> buckets_;
  ReadyOrder order_;
  Timeline timeline_;
  Launcher launcher_;

  // Of this backward.
  std::mutex mutex_;
  Phase phase_ = Phase::idle;
  std::int64_t backward_ = 0;  // counts backwards; 0: none yet
  int ending_depth_ = 0;       // the least depth at which an Ending waits
  std::int64_t newest_id_ = -1;
  std::shared_ptr<void> watch_;
  Bitmap ready_;    // the hook fired in this backward, with or without a gradient
  Bitmap fresh_;    // a gradient came in this backward
  Bitmap updated_;  // ... and has been used up already
  std::size_t fresh_count_ = 0;
  bool by_hand_ = false;  // sync_grads: no backward of its own
  bool void_ = false;     // the loss of this backward has weight 0: it contributes exact zeros, even if it computes NaN
  BackwardMessage message_;
  std::int64_t gradients_end_ns_ = 0;

  // Of steps left to the next forward.
  struct Rest {
    std::unique_ptr<TensorWatch> watch;
    std::optional<at::ThreadLocalState> state;  // steps are taken as they would have been in backward
    std::exception_ptr error;                   // waits for a place that may throw
  };
  Rest rest_;

  // Of this window.
  bool sync_ = true;
  Averaging averaging_;
  std::optional<double> pending_weight_;  // of a backward that has not reached a parameter yet
  std::int64_t pending_id_ = 0;
  double backward_weight_ = 0;                  // of this backward
  std::vector<std::uint32_t> window_versions_;  // of the gradients after the last backward of a weighted window
  int window_backwards_ = 0;
  int accumulated_ = 0;  // backwards that ended well without a synchronisation
  Bitmap opened_;        // had their first gradient of a weighted window
  std::int64_t step_ = 0;
  std::int64_t synchronisations_ = 0;

  // Of a join.
  struct Join {
    bool on = false;
    bool by_active = false;
    bool end_early = false;
    bool shadow = false;    // this rank has no more inputs
    bool weighted = false;  // as the last step was
  };
  Join join_;
  int authority_ = 0;
  bool all_joined_ = false;

  std::shared_ptr<Reducer*> alive_;  // what endings hold weakly
  std::unique_ptr<AutogradHooks> hooks_;
};

}  // namespace unisono
