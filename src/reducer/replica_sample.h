#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace unisono {

/// A hash of a few elements of some parameters, other ones in each step: equal on all ranks while the replicas are.
/// Whatever makes replicas drift apart, an optimizer's setting, a loss scale, a step that one rank left out, moves
/// nearly every element, so that the first step after it shows. At most 64 parameters of two elements each are read,
/// about 2 µs. Only parameters in CPU memory are looked at. Never 0, which stands for "not looked at".
std::uint64_t sample_of_replica(const std::vector<at::Tensor>& parameters, std::int64_t step);

/// A hash of all bits of one parameter.
std::uint64_t hash_of_bits(const at::Tensor& parameter);

}  // namespace unisono
