#pragma once

#include <unisono/dtype.h>
#include <unisono/error.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace unisono {

/// What all ranks' buffers become when they are synchronised.
enum class BufferPolicy {
  rank0,  ///< rank 0's
  mean,   ///< floating and complex buffers: the mean over ranks, one rounding; all others (counts, masks): rank 0's
};

/// Options of `DistributedDataParallel`, named as torch names them.
struct DistributedDataParallelOptions {
  /// Capacity of a gradient bucket in MiB (2^20 bytes); a bucket closes when its size reaches it; 0: a bucket per
  /// gradient. Not given: 25, with a first bucket of 1.
  std::optional<double> bucket_cap_mb = std::nullopt;
  /// Buffers (BatchNorm statistics, ...) are synchronised before the first training forward after a synchronisation.
  bool broadcast_buffers = true;
  /// How they are then; at construction they are always rank 0's.
  BufferPolicy buffer_policy = BufferPolicy::rank0;
  /// Capacity of each bucket in turn, the last one's for all further ones; not empty: in place of `bucket_cap_mb`.
  std::vector<double> bucket_cap_mb_list = {};
  /// Names of parameters that leave in the last buckets, apart from all others: those that fire late or several times.
  std::vector<std::string> delayed_parameters = {};
  /// Rank 0's parameters and buffers go to all ranks at construction, after their shapes have been compared.
  bool init_sync = true;
  /// Walk the autograd graph from forward's outputs, so that buckets of parameters that this backward cannot reach
  /// leave early from the first step on. Unused parameters are right without it.
  bool find_unused_parameters = false;
  /// `.grad` is a view into the bucket: one copy of each gradient less.
  bool gradient_as_bucket_view = true;
  /// The same parameters fire in the same order in every step. Nothing breaks when that is not so.
  bool static_graph = false;
  /// false: reduce after backward instead of while it runs. For measuring.
  bool overlap = true;
  /// One all-reduce per gradient after backward, without buckets or overlap. For measuring.
  bool naive = false;
  /// Ranks may sum up different numbers of backwards between two synchronisations without giving weights. Otherwise
  /// that is an error naming the ranks: most often one of them was in no_sync by mistake.
  bool uneven_accumulation = false;
  /// The dtype in which gradients of floating dtypes are averaged; not given: their own. `.grad` keeps the parameter's
  /// dtype and is then no view. For parameters kept in bf16 or f16, f32.
  std::optional<Dtype> reduce_dtype = std::nullopt;
  /// Raise at the end of a backward in which a gradient of some rank held an infinity or NaN, naming parameter and
  /// rank. Costs a pass over the gradients.
  bool check_finite = false;
  /// Compare a few elements of the parameters over ranks in every step; raise when the replicas have drifted apart,
  /// naming the first parameter that differs. Costs about 2 µs a step and no message. Without `init_sync` replicas may
  /// be different on purpose and are not compared.
  bool check_replicas = true;
  /// Names of parameters whose gradients are sparse. They are gathered instead of reduced in a bucket. Embedding layers
  /// made with sparse=true are found without.
  std::vector<std::string> sparse_parameters = {};
  /// Raise at the end of a backward in which a parameter received no gradient, naming it.
  bool strict = false;
  /// Names of parameters and buffers that are left alone, e.g. "encoder.weight".
  std::vector<std::string> parameters_and_buffers_to_ignore = {};
  /// For bindings of other languages: called with each error that is about to leave backward through autograd, and may
  /// throw that language's own exception in its place.
  std::function<void(const Error&)> rethrow = nullptr;
};

}  // namespace unisono
