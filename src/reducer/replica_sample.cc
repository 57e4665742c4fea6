#include "reducer/replica_sample.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

namespace unisono {
namespace {

constexpr std::uint64_t kStart = 0xcbf29ce484222325;

// Mixing by multiplication and shift, as hash tables do; nothing depends on which.
std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15;
  return hash ^ hash >> 29;
}

std::uint64_t mix_bytes(std::uint64_t hash, const std::byte* data, std::size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    hash = mix(hash, word);
  }
  std::uint64_t rest = 0;
  std::memcpy(&rest, data, bytes);
  return mix(hash, rest);
}

}  // namespace

std::uint64_t sample_of_replica(const std::vector<at::Tensor>& parameters, std::int64_t step) {
  constexpr std::size_t kMost = 64;
  const std::size_t count = std::min(kMost, parameters.size());
  std::uint64_t hash = kStart;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t which = (static_cast<std::size_t>(step) * kMost + i) % parameters.size();
    const at::Tensor& p = parameters[which];
    if (!p.is_cpu() || p.numel() == 0 || !p.is_non_overlapping_and_dense()) continue;
    const auto* data = static_cast<const std::byte*>(p.const_data_ptr());
    const auto elements = static_cast<std::size_t>(p.numel());
    const std::size_t width = p.element_size();
    for (std::size_t at : {static_cast<std::size_t>(step) * 2654435761u % elements, elements - 1}) {
      hash = mix_bytes(hash, data + at * width, width);
    }
  }
  return hash == 0 ? 1 : hash;
}

std::uint64_t hash_of_bits(const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  const at::Tensor bits = parameter.detach().cpu().contiguous();
  return mix_bytes(kStart, static_cast<const std::byte*>(bits.const_data_ptr()), bits.nbytes());
}

}  // namespace unisono
