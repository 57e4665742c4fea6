#include "reducer/bucket_plan.h"

#include <unisono/error.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <tuple>

namespace unisono {

namespace {

constexpr std::size_t mib = 1024 * 1024;

std::size_t bytes_of(double cap) {
  if (!(cap >= 0) || std::isinf(cap)) {
    throw Error(ErrorCode::invalid_argument, "bucket_cap_mb is " + std::to_string(cap) +
                                                 "; it must be a number of MiB, 0 for a bucket per gradient");
  }
  return static_cast<std::size_t>(cap * mib);
}

}  // namespace

BucketCaps BucketCaps::from(const DistributedDataParallelOptions& options) {
  if (options.naive) return {0, 0};
  if (!options.bucket_cap_mb_list.empty()) {
    BucketCaps caps;
    for (double cap : options.bucket_cap_mb_list) caps.list.push_back(bytes_of(cap));
    return caps;
  }
  if (!options.bucket_cap_mb) return {1 * mib, 25 * mib};
  const std::size_t bytes = bytes_of(*options.bucket_cap_mb);
  return {bytes, bytes};
}

std::vector<BucketSpec> plan_buckets(std::span<const GradientSpec> gradients, std::span<const std::size_t> order,
                                     BucketCaps caps) {
  struct Open {
    BucketSpec bucket;
    std::size_t payload = 0;  // without padding: what the cap is compared with
    std::size_t last = 0;     // position in `order` of the last member
    std::size_t closed = 0;
  };
  std::map<std::tuple<Dtype, Device::Kind, int>, Open> open;
  std::vector<std::pair<std::size_t, BucketSpec>> closed;

  auto close = [&](Open& o) {
    closed.emplace_back(o.last, std::move(o.bucket));
    o.bucket = {};
    o.payload = 0;
    ++o.closed;
  };
  for (std::size_t position = 0; position < order.size(); ++position) {
    const GradientSpec& g = gradients[order[position]];
    Open& o = open[{g.dtype, g.device.kind, g.device.index}];
    o.bucket.dtype = g.dtype;
    o.bucket.device = g.device;
    o.bucket.members.push_back(order[position]);
    o.bucket.offsets.push_back(o.bucket.bytes);
    o.bucket.bytes += (g.bytes + kAlignment - 1) / kAlignment * kAlignment;
    o.payload += g.bytes;
    o.last = position;
    if (o.payload >= caps.of(o.closed)) close(o);
  }
  for (auto& [key, o] : open) {
    if (!o.bucket.members.empty()) close(o);
  }
  std::sort(closed.begin(), closed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });

  std::vector<BucketSpec> plan;
  for (auto& [last, bucket] : closed) plan.push_back(std::move(bucket));
  return plan;
}

}  // namespace unisono
