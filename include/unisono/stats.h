#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace unisono {

/// One bucket's way through a backward: nanoseconds of the host's monotonic clock, 0 where it did not happen or is not
/// known.
struct BucketStats {
  int bucket = 0;
  std::int64_t bytes = 0;           ///< handed to collectives
  std::int64_t first_ready_ns = 0;  ///< its first gradient was ready ...
  std::int64_t ready_ns = 0;        ///< ... and its last, on this rank
  std::int64_t launched_ns = 0;
  std::vector<std::int64_t> arrivals_ns;  ///< when each rank launched it; empty where the transport cannot know
  std::int64_t done_ns = 0;               ///< when this rank noticed that it was averaged
};

/// The rank that others waited for most in a step.
struct Straggler {
  int rank = -1;  ///< -1: unknown, or nobody was waited for
  int bucket = -1;
  double late_s = 0;  ///< between the last but one arrival at that bucket and this rank's
};

/// What one synchronising backward cost this rank. Times are seconds.
struct StepStats {
  std::int64_t step = -1;  ///< counts synchronising backwards from 0
  double backward_s = 0;   ///< from the first gradient hook to the last averaged gradient
  double exposed_s = 0;    ///< of that, time the training thread spent launching, moving or waiting for messages
  double waiting_s = 0;    ///< of the exposed time, after the last gradient was ready
  double hidden_s = 0;     ///< messages were in flight while gradients were still being computed
  std::int64_t bytes = 0;  ///< handed to collectives by this rank
  int messages = 0;        ///< all-reduces launched, control-only ones included
  int rebuilds = 0;        ///< bucket rebuilds since construction
  std::vector<BucketStats> buckets = {};

  Straggler straggler() const;
};

/// One line of JSON, without the line's end.
std::string to_json(const StepStats& stats);

/// One thing on the timeline.
struct TraceEvent {
  std::string name;           ///< "hook", "bucket 0", "all-reduce 0", "backward"
  std::string category;       ///< the row: "hooks", "buckets", "all-reduce", "steps"
  std::int64_t begin_ns = 0;  ///< host monotonic clock
  std::int64_t end_ns = 0;
  std::int64_t step = -1;
  int bucket = -1;
};

/// Writes events as a Chrome trace, which chrome://tracing and Perfetto open; one process row per rank.
/// Several ranks' files can be concatenated by `unisono trace merge`.
/// *Throws* `Error` when the file cannot be written; it appears whole or not at all.
void write_chrome_trace(const std::string& path, int rank, const std::vector<TraceEvent>& events);

}  // namespace unisono
