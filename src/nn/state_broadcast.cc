#include "nn/state_broadcast.h"

#include <numeric>

#include <ATen/ATen.h>

#include "reducer/bucket_plan.h"
#include "reducer/torch_types.h"

namespace unisono {
namespace {

at::Tensor bytes_of(const at::Tensor& tensor) {
  at::Tensor whole = tensor.contiguous();
  return at::empty({0}, whole.options().dtype(at::kByte))
      .set_(whole.storage(), whole.storage_offset() * static_cast<std::int64_t>(whole.element_size()),
            {static_cast<std::int64_t>(whole.nbytes())}, {1});
}

}  // namespace

void broadcast_state(const std::vector<NamedTensor>& tensors, int root, ProcessGroup& group, const char* what) {
  if (group.size() == 1) return;
  at::NoGradGuard no_grad;
  std::vector<GradientSpec> specs;
  std::vector<at::Tensor> values;
  for (const NamedTensor& t : tensors) {
    if (!t.tensor.defined() || t.tensor.numel() == 0) continue;
    values.push_back(t.tensor.detach());
    specs.push_back({values.back().nbytes(), Dtype::u8, place_of(t.tensor)});
  }
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  constexpr std::size_t cap = 25 * 1024 * 1024;
  CallOptions options;
  options.tag.what = what;
  for (const BucketSpec& bucket : plan_buckets(specs, order, {cap, cap})) {
    at::Tensor packed = at::empty({static_cast<std::int64_t>(bucket.bytes)},
                                  values[bucket.members.front()].options().dtype(at::kByte));
    auto piece = [&](std::size_t i) {
      return packed.narrow(0, static_cast<std::int64_t>(bucket.offsets[i]),
                           static_cast<std::int64_t>(values[bucket.members[i]].nbytes()));
    };
    if (group.rank() == root) {
      for (std::size_t i = 0; i < bucket.members.size(); ++i) piece(i).copy_(bytes_of(values[bucket.members[i]]));
    }
    const Buffer buffer{packed.data_ptr(), bucket.bytes, Dtype::u8, bucket.device, std::make_shared<at::Tensor>(packed)};
    group.broadcast(buffer, root, options).wait();
    if (group.rank() == root) continue;
    for (std::size_t i = 0; i < bucket.members.size(); ++i) {
      at::Tensor& value = values[bucket.members[i]];
      value.copy_(piece(i).view(value.scalar_type()).view(value.sizes()));
    }
  }
}

}  // namespace unisono
