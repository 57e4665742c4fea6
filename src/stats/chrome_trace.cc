#include <unisono/stats.h>

#include <cstdio>
#include <map>

#include "base/atomic_file.h"
#include "stats/json.h"

// Source: the Trace Event Format that chrome://tracing and Perfetto read. A process is a rank, a thread is a category,
// "X" is a span with its length; times are microseconds.

namespace unisono {
namespace {

std::string microseconds(std::int64_t ns) {
  char text[40];
  const bool negative = ns < 0;
  const auto magnitude = negative ? 0 - static_cast<std::uint64_t>(ns) : static_cast<std::uint64_t>(ns);
  std::snprintf(text, sizeof text, "%s%llu.%03u", negative ? "-" : "",
                static_cast<unsigned long long>(magnitude / 1000), static_cast<unsigned>(magnitude % 1000));
  return text;
}

std::string name_of(const char* what, int rank, int row, const std::string& name) {
  return std::string("{\"ph\":\"M\",\"name\":\"") + what + "\",\"pid\":" + std::to_string(rank) +
         ",\"tid\":" + std::to_string(row) + ",\"args\":{\"name\":" + json_string(name) + "}}";
}

std::string span_of(const TraceEvent& event, int rank, int row) {
  std::string out = "{\"ph\":\"X\",\"name\":" + json_string(event.name) + ",\"cat\":" + json_string(event.category) +
                    ",\"pid\":" + std::to_string(rank) + ",\"tid\":" + std::to_string(row) +
                    ",\"ts\":" + microseconds(event.begin_ns) +
                    ",\"dur\":" + microseconds(event.end_ns < event.begin_ns ? 0 : event.end_ns - event.begin_ns) +
                    ",\"args\":{\"step\":" + std::to_string(event.step);
  if (event.bucket >= 0) out += ",\"bucket\":" + std::to_string(event.bucket);
  return out + "}}";
}

}  // namespace

void write_chrome_trace(const std::string& path, int rank, const std::vector<TraceEvent>& events) {
  std::map<std::string, int> rows;  // in order of first appearance
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  out += name_of("process_name", rank, 0, "rank " + std::to_string(rank));
  for (const TraceEvent& event : events) {
    const auto [row, is_new] = rows.try_emplace(event.category, static_cast<int>(rows.size()));
    if (is_new) out += ",\n" + name_of("thread_name", rank, row->second, event.category);
    out += ",\n" + span_of(event, rank, row->second);
  }
  write_file_atomically(path, out + "\n]}\n");
}

}  // namespace unisono
