#include <unisono/stats.h>

#include <algorithm>
#include <cstdio>

namespace unisono {

Straggler StepStats::straggler() const {
  Straggler worst;
  for (const BucketStats& b : buckets) {
    if (b.arrivals_ns.size() < 2) continue;
    const auto last = std::max_element(b.arrivals_ns.begin(), b.arrivals_ns.end());
    std::int64_t before = 0;
    for (auto a = b.arrivals_ns.begin(); a != b.arrivals_ns.end(); ++a) {
      if (a != last) before = std::max(before, *a);
    }
    const double late_s = static_cast<double>(*last - before) * 1e-9;
    if (late_s > worst.late_s) worst = {static_cast<int>(last - b.arrivals_ns.begin()), b.bucket, late_s};
  }
  return worst;
}

namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string to_json(const BucketStats& b) {
  std::string arrivals;
  for (std::int64_t a : b.arrivals_ns) arrivals += (arrivals.empty() ? "" : ", ") + std::to_string(a);
  return "{\"bucket\": " + std::to_string(b.bucket) + ", \"bytes\": " + std::to_string(b.bytes) +
         ", \"first_ready_ns\": " + std::to_string(b.first_ready_ns) + ", \"ready_ns\": " + std::to_string(b.ready_ns) +
         ", \"launched_ns\": " + std::to_string(b.launched_ns) + ", \"arrivals_ns\": [" + arrivals +
         "], \"done_ns\": " + std::to_string(b.done_ns) + "}";
}

}  // namespace

std::string to_json(const StepStats& s) {
  const Straggler late = s.straggler();
  std::string buckets;
  for (const BucketStats& b : s.buckets) buckets += (buckets.empty() ? "" : ", ") + to_json(b);
  return "{\"step\": " + std::to_string(s.step) + ", \"backward_s\": " + number(s.backward_s) +
         ", \"exposed_s\": " + number(s.exposed_s) + ", \"waiting_s\": " + number(s.waiting_s) +
         ", \"hidden_s\": " + number(s.hidden_s) + ", \"bytes\": " + std::to_string(s.bytes) +
         ", \"messages\": " + std::to_string(s.messages) + ", \"rebuilds\": " + std::to_string(s.rebuilds) +
         ", \"straggler\": {\"rank\": " + std::to_string(late.rank) + ", \"bucket\": " + std::to_string(late.bucket) +
         ", \"late_s\": " + number(late.late_s) + "}, \"buckets\": [" + buckets + "]}";
}

}  // namespace unisono
