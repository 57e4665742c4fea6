#include "reducer/buckets.h"

#include <ATen/ATen.h>

#include <map>

#include "comm/c10d/tensors.h"

namespace unisono {
namespace {

at::Storage storage_of(const Buffer& memory) {
  auto* owner = new std::shared_ptr<void>(memory.owner);
  at::DataPtr pointer(memory.data, owner, [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); }, at::kCPU);
  return at::Storage(at::Storage::use_byte_size_t{}, static_cast<std::int64_t>(memory.bytes()), std::move(pointer));
}

}  // namespace

Buckets::Buckets(std::vector<BucketSpec> plan, std::vector<GradientSlot>& slots, ProcessGroup& group)
    : bucket_of_(slots.size(), -1) {
  std::map<std::pair<Device::Kind, int>, std::size_t> bytes;
  for (const BucketSpec& spec : plan) bytes[{spec.device.kind, spec.device.index}] += spec.bytes;

  struct Arena {
    at::Storage storage;
    std::byte* data = nullptr;
    std::shared_ptr<void> owner;
    std::size_t used = 0;
  };
  std::map<std::pair<Device::Kind, int>, Arena> arenas;
  for (const auto& [device, size] : bytes) {
    Arena& arena = arenas[device];
    if (device.first == Device::Kind::cpu) {
      const Buffer memory = group.allocate(size);
      arena = {storage_of(memory), static_cast<std::byte*>(memory.data), memory.owner, 0};
    } else {
      auto tensor = std::make_shared<at::Tensor>(at::zeros(
          {static_cast<std::int64_t>(size)},
          at::TensorOptions().dtype(at::kByte).device(at::kCUDA, static_cast<at::DeviceIndex>(device.second))));
      arena = {tensor->storage(), static_cast<std::byte*>(tensor->data_ptr()), tensor, 0};
    }
  }
  for (BucketSpec& spec : plan) {
    Arena& arena = arenas[{spec.device.kind, spec.device.index}];
    for (std::size_t i = 0; i < spec.members.size(); ++i) {
      slots[spec.members[i]].place(arena.storage, arena.used + spec.offsets[i]);
      bucket_of_[spec.members[i]] = static_cast<int>(buckets_.size());
    }
    Bucket bucket;
    bucket.buffer = {arena.data + arena.used, spec.bytes / size_of(spec.dtype), spec.dtype, spec.device, arena.owner};
    bucket.flat = tensor_of(bucket.buffer);
    bucket.stats.bucket = static_cast<int>(buckets_.size());
    arena.used += spec.bytes;
    bucket.spec = std::move(spec);
    buckets_.push_back(std::move(bucket));
  }
}

}  // namespace unisono
