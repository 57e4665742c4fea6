#pragma once

#include <torch/torch.h>

#include <cstring>
#include <string>
#include <vector>

namespace unisono::differential {

/// What a rank shows after an action. Entries per parameter in registration order; undefined gradients stay undefined.
struct Snapshot {
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> parameters;
  std::vector<std::string> outcomes;  // of each backward, forward that throws, or sync_grads: the error, empty for none
};

struct RankRecord {
  std::vector<Snapshot> after;  // one per action
  std::string error;            // what ended the run before its time
};

/// A copy without history, in logical order, lazy conjugates carried out, so that only values matter.
inline at::Tensor copy_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return tensor.detach().resolve_conj().resolve_neg().clone(at::MemoryFormat::Contiguous);
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor x = copy_of(a), y = copy_of(b);
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace unisono::differential
