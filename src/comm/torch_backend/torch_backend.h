#pragma once

#include <unisono/process_group.h>

#include <atomic>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/point_to_point.h"
#include "comm/torch_backend/future_thread.h"
#include "comm/torch_backend/torch_work.h"

namespace unisono {

/// A unisono group as torch.distributed's backend "unisono". It only translates: tensors to buffers (complex numbers as
/// pairs, strided tensors through a copy), operations to the contract's six. Lists of tensors travel as one flat
/// buffer. Messages between two ranks, blocks of different sizes and sparse tensors go by the transport's
/// `PointToPoint`. What is not overridden throws c10d's "Backend unisono does not support ...".
class TorchBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// `beside` may be null, see make_torch_backend.
  TorchBackend(std::shared_ptr<ProcessGroup> group, c10::intrusive_ptr<c10d::Backend> beside);

  const std::shared_ptr<ProcessGroup>& group() const { return group_; }

  const std::string getBackendName() const override { return "unisono"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  void abort() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  /// A group of its own of these ranks, who all call this; null on the others.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;

 private:
  std::chrono::nanoseconds timeout_of(std::chrono::milliseconds given) const;
  CallOptions within(std::chrono::milliseconds given) const;
  AllReduceOptions reduction(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* operation,
                             std::chrono::milliseconds given) const;
  WorkPtr start(c10d::OpType type, TorchWork::Call call) { return start(type, std::move(call), futures_); }
  WorkPtr start(c10d::OpType type, TorchWork::Call call, const std::shared_ptr<FutureThread>& thread);
  PointToPoint& messages(const char* operation) const;
  std::int64_t next_exchange();
  WorkPtr sum_sparse(Tensors& tensors, const c10d::AllreduceOptions& options);
  WorkPtr receive(const at::Tensor& tensor, int from, int tag, c10d::OpType type);
  void exchange(TorchWork::Call& call, const Tensors& outputs, const Tensors& inputs,
                std::chrono::milliseconds timeout);
  WorkPtr gather_by_broadcasts(const Tensors& outputs, const at::Tensor& input, std::chrono::milliseconds timeout);
  WorkPtr scatter_the_whole_sum(const at::Tensor& output, const Tensors& inputs,
                                const c10d::ReduceScatterOptions& options);
  WorkPtr all_to_all_in_one(const Tensors& outputs, const Tensors& inputs, const c10d::AllToAllOptions& options);
  void add_all_reduce(TorchWork::Call& call, const at::Tensor& tensor, const AllReduceOptions& options);
  void add_all_gather(TorchWork::Call& call, const at::Tensor& out, const at::Tensor& in, const CallOptions& options);
  void add_reduce_scatter(TorchWork::Call& call, const at::Tensor& out, const at::Tensor& in,
                          const AllReduceOptions& options);

  std::shared_ptr<ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> beside_;
  PointToPoint* post_;  // the group's, or null
  std::shared_ptr<FutureThread> futures_;
  std::shared_ptr<FutureThread> halves_;  // begins the second halves of sparse sums, which are behind nothing else
  c10::intrusive_ptr<Options> options_;
  std::atomic<std::int64_t> timeout_ms_{0};  // 0: the group's own
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<std::int64_t> exchanges_{0};
};

}  // namespace unisono
