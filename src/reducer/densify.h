#pragma once

#include <ATen/ATen.h>

namespace unisono {

/// A gradient as a strided tensor. Not `to_dense()` alone: torch 2.13 makes zeros of a sparse tensor of one entry whose
/// values are expanded (stride 0), which is what `embedding(...).sum().backward()` leaves.
inline at::Tensor densified(const at::Tensor& gradient) {
  const at::Tensor plain = gradient.detach();
  if (plain.layout() == at::kStrided) return plain;
  if (plain.layout() != at::kSparse) return plain.to_dense();
  return at::sparse_coo_tensor(plain._indices(), plain._values().clone(at::MemoryFormat::Contiguous), plain.sizes())
      .to_dense();
}

}  // namespace unisono
