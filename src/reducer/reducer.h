#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <unisono/distributed_data_parallel.h>
#include <unisono/process_group.h>

#include "reducer/autograd_hooks.h"
#include "reducer/backward_message.h"
#include "reducer/buckets.h"
#include "reducer/launcher.h"
#include "reducer/ready_order.h"
#include "reducer/timeline.h"

namespace unisono {

/// Averages gradients over ranks while backward runs.
///
/// A backward is `idle` until the first gradient hook fires. With synchronisation on it is then `reducing`: every hook that
/// fires counts its bucket down, buckets leave in plan order, and the end of the outermost backward sends the last one,
/// waits, and settles what the ranks said happened. With synchronisation off it is `local`: gradients accumulate.
/// A *window* is everything since the last synchronisation: local backwards and the reducing one that closes it.
///
/// *Threads*: hooks run where autograd runs them, under one lock. Everything else: the training thread.
class Reducer final : public GradientListener {
 public:
  struct Options {
    BucketCaps caps;
    bool overlap = true;
    bool as_view = true;
    bool strict = false;
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
  bool has_unsynchronised() const { return window_backwards_ > 0; }

  /// How many synchronisations have ended well.
  std::int64_t synchronisations() const { return synchronisations_; }
  Timeline& timeline() { return timeline_; }
  std::vector<std::int64_t> bucket_sizes() const;

  at::Tensor before_accumulate(std::size_t index, const at::Tensor& gradient) override;
  void after_accumulate(std::size_t index) override;
  void leaving(const Error& error) override;

 private:
  enum class Phase { idle, local, reducing };
  class Ending;  // queued at the end of a backward; tells a good end from an exception

  // The one place where the phase changes.
  enum class Event { first_hook, by_hand, end, failure };
  void transition(Event event);

  void enter();                                // a hook fires: arms, or follows a backward to its outer one
  void arm(const BackwardContext& context);
  void queue_end(const BackwardContext& context);
  void reached_end(std::int64_t backward, int depth);
  void abandon(std::int64_t backward) noexcept;

  void begin_backward();
  void check_weight();
  void begin_reduction();                      // every bucket expects its gradients again
  void mark_ready(std::size_t index);
  void launch_next(bool withhold);
  void finish_reduction();
  void fail_reduction();
  void reduce_late(const BackwardMessage& verdict);
  void settle(const BackwardMessage& verdict);
  void close_window();
  void rebuild();
  std::string names_of(const Bitmap& set) const;
  std::string describe_bucket(std::size_t index) const;

  // Fixed.
  std::shared_ptr<ProcessGroup> group_;
  const Options options_;
  std::vector<GradientSlot> slots_;

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
  Bitmap ready_;   // the hook fired in this backward, with or without a gradient
  Bitmap fresh_;   // a gradient came in this backward
  std::size_t fresh_count_ = 0;
  bool void_ = false;  // the loss of this backward has weight 0: it contributes exact zeros, even if it computes NaN
  BackwardMessage message_;

  // Of this window.
  bool sync_ = true;
  Averaging averaging_;
  double unused_weight_ = 0;        // given since the last backward
  bool has_unused_weight_ = false;
  int window_backwards_ = 0;
  Bitmap opened_;  // had their first gradient of a weighted window
  std::int64_t step_ = 0;
  std::int64_t synchronisations_ = 0;

  std::shared_ptr<Reducer*> alive_;  // what endings hold weakly
  std::unique_ptr<AutogradHooks> hooks_;
};

}  // namespace unisono
