#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <unisono/error.h>

namespace unisono {

/// Options of `DistributedDataParallel`, named as torch names them.
struct DistributedDataParallelOptions {
  /// Capacity of a gradient bucket in MiB (2^20 bytes); a bucket closes when its size reaches it; 0: a bucket per gradient.
  /// Not given: 25, with a first bucket of 1.
  std::optional<double> bucket_cap_mb = std::nullopt;
  /// Rank 0's buffers (BatchNorm statistics, ...) go to all ranks before the first forward after a synchronisation.
  bool broadcast_buffers = true;
  /// Rank 0's parameters and buffers go to all ranks at construction, after their shapes have been compared.
  bool init_sync = true;
  /// Walk the autograd graph from forward's outputs, so that buckets of parameters that this backward cannot reach leave
  /// early from the first step on. Unused parameters are right without it.
  bool find_unused_parameters = false;
  /// `.grad` is a view into the bucket: one copy of each gradient less.
  bool gradient_as_bucket_view = true;
  /// The same parameters fire in the same order in every step. Nothing breaks when that is not so.
  bool static_graph = false;
  /// false: reduce after backward instead of while it runs. For measuring.
  bool overlap = true;
  /// One all-reduce per gradient after backward, without buckets or overlap. For measuring.
  bool naive = false;
  /// Raise at the end of a backward in which a parameter received no gradient, naming it.
  bool strict = false;
  /// Names of parameters and buffers that are left alone, e.g. "encoder.weight".
  std::vector<std::string> parameters_and_buffers_to_ignore = {};
  /// For bindings of other languages: called with each error that is about to leave backward through autograd, and may throw
  /// that language's own exception in its place.
  std::function<void(const Error&)> rethrow = nullptr;
};

}  // namespace unisono
