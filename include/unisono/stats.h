#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace unisono {

/// What one synchronising backward cost this rank. Times are seconds.
struct StepStats {
  std::int64_t step = -1;      ///< counts synchronising backwards from 0
  double backward_s = 0;       ///< from the first gradient hook to the last averaged gradient
  double exposed_s = 0;        ///< of that, time the training thread spent launching, moving or waiting for messages
  double waiting_s = 0;        ///< of the exposed time, after the last gradient was ready
  std::int64_t bytes = 0;      ///< reduced by this rank's messages
  int messages = 0;            ///< all-reduces launched, control-only ones included
  int rebuilds = 0;            ///< bucket rebuilds since construction
};

/// One thing on the timeline.
struct TraceEvent {
  std::string name;      ///< "hook", "bucket 0", "all-reduce 0", "backward"
  std::string category;  ///< the row: "hooks", "buckets", "all-reduce", "steps"
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
