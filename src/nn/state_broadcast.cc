#include "nn/state_broadcast.h"

#include <ATen/ATen.h>

#include <numeric>

#include "reducer/torch_types.h"

namespace unisono {
namespace {

at::Tensor bytes_of(const at::Tensor& tensor) {
  at::Tensor whole = tensor.resolve_conj().resolve_neg().contiguous();
  return at::empty({0}, whole.options().dtype(at::kByte))
      .set_(whole.storage(), whole.storage_offset() * static_cast<std::int64_t>(whole.element_size()),
            {static_cast<std::int64_t>(whole.nbytes())}, {1});
}

Dtype dtype_in_message(const at::Tensor& tensor, BufferPolicy policy) {
  if (policy == BufferPolicy::rank0) return Dtype::u8;
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return wire_type(tensor.scalar_type(), "a buffer").dtype;
    default:
      return Dtype::u8;
  }
}

// What travels, in the order of `plan_state`'s indices.
std::vector<const NamedTensor*> travelling(const std::vector<NamedTensor>& tensors) {
  std::vector<const NamedTensor*> out;
  for (const NamedTensor& t : tensors) {
    if (t.tensor.defined() && t.tensor.numel() > 0) out.push_back(&t);
  }
  return out;
}

// Autograd keeps BatchNorm's statistics for a backward that never reads them: to write them between that forward and
// its backward must not count as a change. A change of any other tensor must.
at::Tensor written_through(const NamedTensor& t) {
  for (const char* statistic : {"running_mean", "running_var", "num_batches_tracked"}) {
    if (t.name.ends_with(statistic)) return t.tensor.variable_data();
  }
  return t.tensor.detach();
}

Work send(const BucketSpec& message, const at::Tensor& packed, int root, ProcessGroup& group, const char* what,
          bool withhold) {
  const Buffer buffer{packed.data_ptr(), message.bytes / size_of(message.dtype), message.dtype, message.device,
                      std::make_shared<at::Tensor>(packed)};
  AllReduceOptions options;
  options.tag.what = what;
  options.withhold = withhold;
  options.op = ReduceOp::avg;
  Work work = message.dtype == Dtype::u8 ? group.broadcast(buffer, root, options) : group.all_reduce(buffer, options);
  work.wait();
  return work;
}

}  // namespace

std::vector<BucketSpec> plan_state(const std::vector<NamedTensor>& tensors, BufferPolicy policy) {
  std::vector<GradientSpec> specs;
  for (const NamedTensor* t : travelling(tensors)) {
    specs.push_back({t->tensor.nbytes(), dtype_in_message(t->tensor, policy), place_of(t->tensor)});
  }
  std::vector<std::size_t> order(specs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  constexpr std::size_t cap = 25 * 1024 * 1024;
  return plan_buckets(specs, order, {cap, cap});
}

bool exchange_state(const std::vector<NamedTensor>& tensors, const std::vector<BucketSpec>& plan, int root,
                    ProcessGroup& group, const char* what) {
  at::NoGradGuard no_grad;
  const auto values = travelling(tensors);
  for (const BucketSpec& message : plan) {
    const auto& device = values[message.members.front()]->tensor.options();
    at::Tensor packed = at::zeros({static_cast<std::int64_t>(message.bytes)}, device.dtype(at::kByte));
    const auto piece = [&](std::size_t i) {
      return packed.narrow(0, static_cast<std::int64_t>(message.offsets[i]),
                           static_cast<std::int64_t>(values[message.members[i]]->tensor.nbytes()));
    };
    for (std::size_t i = 0; i < message.members.size(); ++i) {
      if (message.dtype == Dtype::u8 && group.rank() != root) break;
      piece(i).copy_(bytes_of(values[message.members[i]]->tensor.detach()));
    }
    if (send(message, packed, root, group, what, false).withheld()) return false;
    for (std::size_t i = 0; i < message.members.size(); ++i) {
      const NamedTensor& value = *values[message.members[i]];
      if (at::equal(piece(i), bytes_of(value.tensor.detach()))) continue;
      written_through(value).copy_(piece(i).view(value.tensor.scalar_type()).view(value.tensor.sizes()));
    }
  }
  return true;
}

void withhold_state(const std::vector<BucketSpec>& plan, int root, ProcessGroup& group, const char* what) {
  const BucketSpec& first = plan.front();
  const auto device = first.device.kind == Device::Kind::cuda
                          ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(first.device.index))
                          : at::Device(at::kCPU);
  const at::Tensor unused =
      at::zeros({static_cast<std::int64_t>(first.bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
  send(first, unused, root, group, what, true);
}

void broadcast_state(const std::vector<NamedTensor>& tensors, int root, ProcessGroup& group, const char* what) {
  if (group.size() == 1) return;
  exchange_state(tensors, plan_state(tensors, BufferPolicy::rank0), root, group, what);
}

}  // namespace unisono
