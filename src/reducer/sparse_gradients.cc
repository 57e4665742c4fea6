#include "reducer/sparse_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "comm/c10d/tensors.h"
#include "reducer/densify.h"

namespace unisono {
namespace {

constexpr std::int64_t kDense = -1;
constexpr const char* kWhat = "a sparse gradient";

class Gatherer {
 public:
  Gatherer(ProcessGroup& group, std::int64_t step, std::size_t& bytes) : group_(group), bytes_(bytes) {
    options_.tag = {step, -1, "sparse gradients"};
  }
  int ranks() const { return group_.size(); }

  /// Every rank's `mine`, stacked.
  at::Tensor all(const at::Tensor& mine) {
    std::vector<std::int64_t> sizes = mine.sizes().vec();
    sizes.insert(sizes.begin(), group_.size());
    at::Tensor out = at::empty(sizes, mine.options());
    bytes_ += mine.nbytes() * static_cast<std::size_t>(group_.size() - 1);
    group_.all_gather(buffer_of(out, kWhat), buffer_of(mine, kWhat), options_).wait();
    return out;
  }
  void sum(const at::Tensor& dense) {
    AllReduceOptions options;
    options.tag = options_.tag;
    bytes_ += dense.nbytes();
    group_.all_reduce(buffer_of(dense, kWhat), options).wait();
  }

 private:
  ProcessGroup& group_;
  std::size_t& bytes_;
  CallOptions options_;
};

at::Tensor padded(const at::Tensor& tensor, std::int64_t dim, std::int64_t length) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = length;
  at::Tensor out = at::zeros(sizes, tensor.options());
  out.narrow(dim, 0, tensor.size(dim)).copy_(tensor);
  return out;
}

at::Tensor divided(at::Tensor sum, double divisor) { return divisor > 0 ? sum.div_(divisor) : sum.mul_(0); }

at::Tensor average_dense(const SparseGradient& entry, double divisor, Gatherer& gather) {
  at::Tensor dense = at::zeros(entry.parameter.sizes(), entry.parameter.options().requires_grad(false));
  if (entry.gradient.defined()) dense.add_(densified(entry.gradient));
  gather.sum(dense);
  return divided(dense, divisor);
}

at::Tensor average_rows(const SparseGradient& entry, at::Tensor mine, const std::int64_t* counts, std::int64_t stride,
                        double divisor, Gatherer& gather) {
  const at::Tensor& parameter = entry.parameter;
  if (!mine.defined()) {  // rows of the parameter, as embeddings make them
    std::vector<std::int64_t> rows = parameter.sizes().vec();
    rows[0] = 0;
    mine = at::sparse_coo_tensor(at::empty({1, 0}, parameter.options().dtype(at::kLong).requires_grad(false)),
                                 at::empty(rows, parameter.options().requires_grad(false)), parameter.sizes());
    mine = mine.coalesce();
  }
  std::int64_t longest = 0;
  for (int r = 0; r < gather.ranks(); ++r) longest = std::max(longest, counts[r * stride]);
  at::Tensor indices = gather.all(padded(mine.indices(), 1, longest));
  at::Tensor values = gather.all(padded(mine.values(), 0, longest));
  std::vector<at::Tensor> all_indices, all_values;
  for (int r = 0; r < gather.ranks(); ++r) {
    all_indices.push_back(indices[r].narrow(1, 0, counts[r * stride]));
    all_values.push_back(values[r].narrow(0, 0, counts[r * stride]));
  }
  at::Tensor sum = at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values), parameter.sizes()).coalesce();
  divided(sum.values(), divisor);
  return sum;
}

}  // namespace

std::vector<at::Tensor> average_sparse(const std::vector<SparseGradient>& gradients, double divisor,
                                       ProcessGroup& group, std::int64_t step, std::size_t& bytes) {
  at::NoGradGuard no_grad;
  Gatherer gather(group, step, bytes);
  std::vector<at::Tensor> mine;
  at::Tensor counts = at::zeros({static_cast<std::int64_t>(gradients.size())}, at::kLong);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    at::Tensor g = gradients[i].gradient;
    if (g.defined() && g.layout() == at::kSparse) g = g.coalesce();
    const bool dense = g.defined() && g.layout() != at::kSparse;
    counts[static_cast<std::int64_t>(i)] = dense ? kDense : g.defined() ? g._nnz() : 0;
    mine.push_back(dense ? at::Tensor{} : g);
  }
  const at::Tensor everyone = gather.all(counts);
  const auto* table = everyone.const_data_ptr<std::int64_t>();
  const auto stride = static_cast<std::int64_t>(gradients.size());
  std::vector<at::Tensor> averages;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::int64_t* column = table + i;
    bool any_dense = false;
    for (int r = 0; r < group.size(); ++r) any_dense |= column[r * stride] == kDense;
    averages.push_back(any_dense ? average_dense(gradients[i], divisor, gather)
                                 : average_rows(gradients[i], mine[i], column, stride, divisor, gather));
  }
  return averages;
}

}  // namespace unisono
