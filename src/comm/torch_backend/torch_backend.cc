#include "comm/torch_backend/torch_backend.h"

#include <ATen/core/grad_mode.h>
#include <unisono/error.h>

#include <algorithm>
#include <utility>

#include "base/kept_name.h"
#include "comm/c10d/tensors.h"
#include "comm/torch_backend/staging.h"

namespace unisono {

TorchBackend::TorchBackend(std::shared_ptr<ProcessGroup> group, c10::intrusive_ptr<c10d::Backend> beside)
    : c10d::Backend(group->rank(), group->size()),
      group_(std::move(group)),
      beside_(std::move(beside)),
      post_(dynamic_cast<PointToPoint*>(group_.get())),
      futures_(std::make_shared<FutureThread>()),
      halves_(std::make_shared<FutureThread>()),
      options_(c10::make_intrusive<Options>(
          "unisono", std::chrono::duration_cast<std::chrono::milliseconds>(group_->timeout()))) {}

void TorchBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  timeout_ms_ = timeout.count();
}

void TorchBackend::abort() {
  group_->abort(
      Error(ErrorCode::peer_lost, "rank " + std::to_string(rank_) + " aborted the group through torch.distributed"));
}

std::chrono::nanoseconds TorchBackend::timeout_of(std::chrono::milliseconds given) const {
  if (given.count() < 0) return std::chrono::milliseconds(timeout_ms_);  // c10d's way to say none
  return std::max<std::chrono::nanoseconds>(given, std::chrono::nanoseconds(1));
}

CallOptions TorchBackend::within(std::chrono::milliseconds given) const {
  CallOptions out;
  out.timeout = timeout_of(given);
  return out;
}

AllReduceOptions TorchBackend::reduction(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* operation,
                                         std::chrono::milliseconds given) const {
  AllReduceOptions out;
  out.op = reduce_op_of(op, tensor, operation);
  out.timeout = timeout_of(given);
  return out;
}

TorchBackend::WorkPtr TorchBackend::start(c10d::OpType type, TorchWork::Call call,
                                          const std::shared_ptr<FutureThread>& thread) {
  ++calls_;
  return c10::make_intrusive<TorchWork>(rank_, type, std::move(call), thread);
}

void TorchBackend::add_all_reduce(TorchWork::Call& call, const at::Tensor& tensor, const AllReduceOptions& options) {
  const at::Tensor data = contiguous_output(call, tensor, "all_reduce", true);
  call.parts.push_back(group_->all_reduce(buffer_of(data, "all_reduce"), options));
  call.outputs.push_back(tensor);
}

TorchBackend::WorkPtr TorchBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  if (tensor.defined() && tensor.layout() == at::kSparse) return sum_sparse(tensors, options);
  TorchWork::Call call;
  const auto how = reduction(options.reduceOp, tensor, "all_reduce", options.timeout);
  multiplied(tensor, options.reduceOp, true);
  add_all_reduce(call, tensor, how);
  return start(c10d::OpType::ALLREDUCE, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& options) {
  TorchWork::Call call;
  for (const auto& tensor : tensors) {
    const auto how = reduction(options.reduceOp, tensor, "all_reduce", options.timeout);
    multiplied(tensor, options.reduceOp, true);
    add_all_reduce(call, tensor, how);
  }
  return start(c10d::OpType::ALLREDUCE_COALESCED, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  TorchWork::Call call;
  const at::Tensor data = contiguous_output(call, tensor, "broadcast", options.rootRank == rank_);
  call.parts.push_back(
      group_->broadcast(moved_buffer(data, "broadcast"), static_cast<int>(options.rootRank), within(options.timeout)));
  call.outputs = {tensor};
  return start(c10d::OpType::BROADCAST, std::move(call));
}

// Only the root's tensor may change, so the others reduce a copy.
TorchBackend::WorkPtr TorchBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "reduce");
  check_dense_cpu(tensor, "reduce");
  const at::NoGradGuard no_grad;
  TorchWork::Call call;
  auto op = reduction(options.reduceOp, tensor, "reduce", options.timeout);
  op.tag.what = kept_name("reduce to rank " + std::to_string(options.rootRank));
  const at::Tensor data = options.rootRank == rank_ ? tensor : tensor.detach().clone(at::MemoryFormat::Contiguous);
  multiplied(data, options.reduceOp, true);
  add_all_reduce(call, data, op);
  call.outputs = {tensor};
  return start(c10d::OpType::REDUCE, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::barrier(const c10d::BarrierOptions& options) {
  TorchWork::Call call;
  call.parts.push_back(group_->barrier(within(options.timeout)));
  return start(c10d::OpType::BARRIER, std::move(call));
}

void TorchBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  barrier(options)->wait();
}

}  // namespace unisono
