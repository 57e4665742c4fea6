#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>
#include <unisono/error.h>
#include <unisono/process_group.h>

#include <functional>
#include <memory>

namespace unisono {

struct SyncBatchNormSettings {
  double eps = 1e-5;
  double momentum = 0.1;  ///< weight of this batch in the running statistics
  /// For bindings of other languages: called with each error that is about to leave backward through autograd, and may
  /// throw that language's own exception in its place.
  std::function<void(const Error&)> rethrow = nullptr;
};

/// Batch normalisation over the samples of all ranks: every rank's output, running statistics and gradients are those
/// of one process that has the union of the batches. Statistics are kept in f64 until they are complete; of f16 and
/// bf16 inputs they are f32. All ranks compute the same bits. Ranks may have different batch sizes; some may have none.
///
/// *Shape*: `input` is (N, C) or (N, C, ...), dense, on the CPU; `weight`, `bias`, `running_mean`, `running_var` are
/// (C) or undefined; the running statistics are updated in place. *Collective*: one all-gather of 1 + 2C f64 per rank,
/// with or without gradient mode; in backward, when `input` takes part in it, one all-reduce of 2C f64. Both run on
/// `companion(group)`, never between the calls of `group`: see companion.h. Every rank must run backward through the
/// result, or none. *Blocks* for the other ranks, at most the group's timeout. *Throws* `invalid_argument` for another
/// shape or device, and on all ranks when there is at most one value per channel in all; `mismatch` when ranks have
/// different C. A second derivative throws `invalid_argument`. *Source*: Ioffe and Szegedy, Batch Normalization, ICML
/// 2015, arXiv 1502.03167; the ranks' variances are combined pairwise by Chan, Golub and LeVeque, Updating Formulae and
/// a Pairwise Algorithm for Computing Sample Variances, COMPSTAT 1982.
at::Tensor sync_batch_norm(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                           const at::Tensor& running_mean, const at::Tensor& running_var,
                           const std::shared_ptr<ProcessGroup>& group, const SyncBatchNormSettings& settings = {});

/// `torch::nn::BatchNorm1d/2d/3d` over the samples of all ranks, for inputs (N, C) and (N, C, ...). Options, parameters
/// and buffers are torch's; so is evaluation mode, which makes no collective: running statistics, or without them (
/// `track_running_stats(false)`) the local batch's.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, std::shared_ptr<ProcessGroup> group);
  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  const std::shared_ptr<ProcessGroup>& group() const { return group_; }
  /// From the next forward on; the same on all ranks. *Throws* `invalid_argument` without a group.
  void set_group(std::shared_ptr<ProcessGroup> group);

 protected:
  void _check_input_dim(const torch::Tensor& input) override;

 private:
  std::shared_ptr<ProcessGroup> group_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace unisono
