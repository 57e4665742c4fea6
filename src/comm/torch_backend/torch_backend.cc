#include "comm/torch_backend/torch_backend.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <unisono/error.h>

#include <algorithm>
#include <utility>

#include "comm/c10d/tensors.h"
#include "comm/torch_backend/staging.h"

namespace unisono {
namespace {

AllReduceOptions reduction(ReduceOp op, std::chrono::nanoseconds timeout) {
  AllReduceOptions out;
  out.op = op;
  out.timeout = timeout;
  return out;
}

CallOptions within(std::chrono::nanoseconds timeout) {
  CallOptions out;
  out.timeout = timeout;
  return out;
}

void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* operation) {
  if (outputs.size() != inputs.size())
    throw Error(ErrorCode::invalid_argument, std::string("unisono ") + operation + ": " +
                                                 std::to_string(outputs.size()) + " outputs and " +
                                                 std::to_string(inputs.size()) + " inputs; they go in pairs");
}

// What a profiler shows; null for what has no range of its own.
const char* title_of(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::ALLREDUCE:
    case c10d::OpType::ALLREDUCE_COALESCED:
      return "unisono:all_reduce";
    case c10d::OpType::_ALLREDUCE_SPARSE:
      return "unisono:sparse_all_reduce";
    case c10d::OpType::BROADCAST:
      return "unisono:broadcast";
    case c10d::OpType::REDUCE:
      return "unisono:reduce";
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::_ALLGATHER_BASE:
    case c10d::OpType::ALLGATHER_COALESCED:
      return "unisono:all_gather";
    case c10d::OpType::GATHER:
      return "unisono:gather";
    case c10d::OpType::SCATTER:
      return "unisono:scatter";
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::_REDUCE_SCATTER_BASE:
      return "unisono:reduce_scatter";
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::ALLTOALL_BASE:
      return "unisono:all_to_all";
    case c10d::OpType::SEND:
      return "unisono:send";
    case c10d::OpType::RECV:
      return "unisono:recv";
    case c10d::OpType::RECVANYSOURCE:
      return "unisono:recvAnySource";
    default:
      return nullptr;
  }
}

// PREMUL_SUM is a sum of the ranks' tensors times a factor; where they may not be changed, of copies.
at::Tensor multiplied(const at::Tensor& tensor, const c10d::ReduceOp& op, bool in_place) {
  const at::NoGradGuard no_grad;
  const auto factor = premultiplier(op);
  if (!factor) return tensor;
  check_dense_cpu(tensor, "PREMUL_SUM");
  return in_place ? tensor.detach().mul_(*factor) : tensor.detach().mul(*factor);
}

// c10d passes a list of lists, one per device of the process; there is one.
const std::vector<at::Tensor>& only_list(const std::vector<std::vector<at::Tensor>>& lists, int size,
                                         const char* operation) {
  if (lists.size() != 1)
    throw Error(ErrorCode::invalid_argument, std::string("unisono ") + operation +
                                                 ": takes one list of tensors per process, got " +
                                                 std::to_string(lists.size()));
  check_count(lists[0].size(), size, operation);
  return lists[0];
}

}  // namespace

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

TorchBackend::WorkPtr TorchBackend::start(c10d::OpType type, TorchWork::Call call,
                                          const std::shared_ptr<FutureThread>& thread) {
  ++calls_;
  return c10::make_intrusive<TorchWork>(rank_, type, title_of(type), std::move(call), thread);
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
  const auto how = reduction(reduce_op_of(options.reduceOp, tensor, "all_reduce"), timeout_of(options.timeout));
  multiplied(tensor, options.reduceOp, true);
  add_all_reduce(call, tensor, how);
  return start(c10d::OpType::ALLREDUCE, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& options) {
  TorchWork::Call call;
  for (const auto& tensor : tensors) {
    const auto how = reduction(reduce_op_of(options.reduceOp, tensor, "all_reduce"), timeout_of(options.timeout));
    multiplied(tensor, options.reduceOp, true);
    add_all_reduce(call, tensor, how);
  }
  return start(c10d::OpType::ALLREDUCE_COALESCED, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  TorchWork::Call call;
  const at::Tensor data = contiguous_output(call, tensor, "broadcast", options.rootRank == rank_);
  call.parts.push_back(group_->broadcast(moved_buffer(data, "broadcast"), static_cast<int>(options.rootRank),
                                         within(timeout_of(options.timeout))));
  call.outputs = {tensor};
  return start(c10d::OpType::BROADCAST, std::move(call));
}

// Only the root's tensor may change, so the others reduce a copy.
TorchBackend::WorkPtr TorchBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "reduce");
  check_dense_cpu(tensor, "reduce");
  const at::NoGradGuard no_grad;
  TorchWork::Call call;
  const auto op = reduction(reduce_op_of(options.reduceOp, tensor, "reduce"), timeout_of(options.timeout));
  const at::Tensor data = options.rootRank == rank_ ? tensor : tensor.detach().clone(at::MemoryFormat::Contiguous);
  multiplied(data, options.reduceOp, true);
  add_all_reduce(call, data, op);
  call.outputs = {tensor};
  return start(c10d::OpType::REDUCE, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::barrier(const c10d::BarrierOptions& options) {
  TorchWork::Call call;
  call.parts.push_back(group_->barrier(within(timeout_of(options.timeout))));
  return start(c10d::OpType::BARRIER, std::move(call));
}

void TorchBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  barrier(options)->wait();
}

void TorchBackend::add_all_gather(TorchWork::Call& call, const at::Tensor& out, const at::Tensor& in,
                                  std::chrono::milliseconds timeout) {
  const at::Tensor from = contiguous_input(in, "all_gather");
  const at::Tensor to = contiguous_output(call, out, "all_gather", false);
  call.parts.push_back(group_->all_gather(moved_buffer(to, "all_gather"), moved_buffer(from, "all_gather"),
                                          within(timeout_of(timeout))));
  call.outputs.push_back(out);
}

TorchBackend::WorkPtr TorchBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only(inputs, "all_gather");
  check_dense_cpu(input, "all_gather");
  TorchWork::Call call;
  const auto& list = only_list(outputs, size_, "all_gather");
  if (!of_one_size(list)) return gather_by_broadcasts(list, input, options.timeout);
  const at::Tensor flat = flat_output(call, list, input, "all_gather");
  add_all_gather(call, flat, input, options.timeout);
  call.outputs = outputs[0];
  return start(c10d::OpType::ALLGATHER, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  TorchWork::Call call;
  add_all_gather(call, output, input, options.timeout);
  return start(c10d::OpType::_ALLGATHER_BASE, std::move(call));
}

// Of different sizes, which all ranks know from their outputs: everybody's tensor on its own.
TorchBackend::WorkPtr TorchBackend::gather_by_broadcasts(const Tensors& outputs, const at::Tensor& input,
                                                         std::chrono::milliseconds timeout) {
  const at::NoGradGuard no_grad;
  const at::Tensor& own = outputs[static_cast<std::size_t>(rank_)];
  check_alike({own}, input, "all_gather");
  own.detach().copy_(input.view(own.sizes()));
  TorchWork::Call call;
  for (int r = 0; r < size_; ++r) {
    const at::Tensor data = contiguous_output(call, outputs[static_cast<std::size_t>(r)], "all_gather", r == rank_);
    call.parts.push_back(group_->broadcast(moved_buffer(data, "all_gather"), r, within(timeout_of(timeout))));
  }
  call.outputs = outputs;
  return start(c10d::OpType::ALLGATHER, std::move(call));
}

// outputs[r][i] receives rank r's inputs[i].
TorchBackend::WorkPtr TorchBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  if (outputs.size() != static_cast<std::size_t>(size_))
    throw Error(ErrorCode::invalid_argument, "unisono all_gather_coalesced: " + std::to_string(outputs.size()) +
                                                 " lists of outputs; the group has " + std::to_string(size_) +
                                                 " ranks");
  TorchWork::Call call;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_all;
    for (auto& list : outputs) {
      check_pairs(list, inputs, "all_gather_coalesced");
      of_all.push_back(list[i]);
    }
    check_dense_cpu(inputs[i], "all_gather_coalesced");
    add_all_gather(call, flat_output(call, of_all, inputs[i], "all_gather_coalesced"), inputs[i], options.timeout);
  }
  call.outputs.clear();
  for (const auto& list : outputs) call.outputs.insert(call.outputs.end(), list.begin(), list.end());
  return start(c10d::OpType::ALLGATHER_COALESCED, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs, "all_gather");
  TorchWork::Call call;
  for (std::size_t i = 0; i < outputs.size(); ++i) add_all_gather(call, outputs[i], inputs[i], options.timeout);
  return start(c10d::OpType::COALESCED, std::move(call));
}

// All ranks gather, because the contract has no call in which only the root receives; the others drop it.
TorchBackend::WorkPtr TorchBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& options) {
  const at::Tensor& input = only(inputs, "gather");
  check_dense_cpu(input, "gather");
  const bool root = options.rootRank == rank_;
  TorchWork::Call call;
  at::Tensor flat;
  if (root) {
    flat = flat_output(call, only_list(outputs, size_, "gather"), input, "gather");
  } else {
    flat = at::empty({input.numel() * size_}, input.options());
  }
  add_all_gather(call, flat, input, options.timeout);
  call.outputs = root ? outputs[0] : Tensors{};
  return start(c10d::OpType::GATHER, std::move(call));
}

void TorchBackend::add_reduce_scatter(TorchWork::Call& call, const at::Tensor& out, const at::Tensor& in,
                                      const AllReduceOptions& options) {
  const at::Tensor from = contiguous_input(in, "reduce_scatter");
  const at::Tensor to = contiguous_output(call, out, "reduce_scatter", false);
  call.parts.push_back(
      group_->reduce_scatter(buffer_of(to, "reduce_scatter"), buffer_of(from, "reduce_scatter"), options));
  call.outputs.push_back(out);
}

TorchBackend::WorkPtr TorchBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  check_dense_cpu(output, "reduce_scatter");
  if (!of_one_size(only_list(inputs, size_, "reduce_scatter")))
    return scatter_the_whole_sum(output, inputs[0], options);
  TorchWork::Call call;
  add_reduce_scatter(call, output,
                     multiplied(flat_input(only_list(inputs, size_, "reduce_scatter"), output, "reduce_scatter"),
                                options.reduceOp, true),
                     reduction(reduce_op_of(options.reduceOp, output, "reduce_scatter"), timeout_of(options.timeout)));
  return start(c10d::OpType::REDUCE_SCATTER, std::move(call));
}

// Of different sizes, which all ranks know from their inputs: everything is reduced, and each rank keeps its own.
TorchBackend::WorkPtr TorchBackend::scatter_the_whole_sum(const at::Tensor& output, const Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  check_alike({inputs[static_cast<std::size_t>(rank_)]}, output, "reduce_scatter");
  const at::NoGradGuard no_grad;
  Tensors flat;
  std::int64_t begin = 0;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    flat.push_back(contiguous_input(inputs[r], "reduce_scatter").detach().reshape(-1));
    if (static_cast<int>(r) < rank_) begin += inputs[r].numel();
  }
  const at::Tensor all = at::cat(flat);
  TorchWork::Call call;
  const auto how = reduction(reduce_op_of(options.reduceOp, all, "reduce_scatter"), timeout_of(options.timeout));
  add_all_reduce(call, multiplied(all, options.reduceOp, true), how);
  call.finish = [output, all, begin] {
    const at::NoGradGuard none;
    output.detach().copy_(all.narrow(0, begin, output.numel()).view(output.sizes()));
  };
  call.outputs = {output};
  return start(c10d::OpType::REDUCE_SCATTER, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::ReduceScatterOptions& options) {
  TorchWork::Call call;
  add_reduce_scatter(call, output, multiplied(input, options.reduceOp, false),
                     reduction(reduce_op_of(options.reduceOp, output, "reduce_scatter"), timeout_of(options.timeout)));
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::ReduceScatterOptions& options) {
  check_pairs(outputs, inputs, "reduce_scatter");
  TorchWork::Call call;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    add_reduce_scatter(
        call, outputs[i], multiplied(inputs[i], options.reduceOp, false),
        reduction(reduce_op_of(options.reduceOp, outputs[i], "reduce_scatter"), timeout_of(options.timeout)));
  return start(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, std::move(call));
}

// The root's blocks go to everybody as one flat buffer, and each rank keeps its own.
TorchBackend::WorkPtr TorchBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(outputs, "scatter");
  check_dense_cpu(output, "scatter");
  at::Tensor flat;
  if (options.rootRank == rank_) {
    flat = flat_input(only_list(inputs, size_, "scatter"), output, "scatter");
  } else {
    flat = at::empty({output.numel() * size_}, output.options());
  }
  TorchWork::Call call;
  call.parts.push_back(group_->broadcast(moved_buffer(flat, "scatter"), static_cast<int>(options.rootRank),
                                         within(timeout_of(options.timeout))));
  call.finish = [output, flat, rank = rank_] {
    const at::NoGradGuard no_grad;
    output.detach().copy_(flat.narrow(0, rank * output.numel(), output.numel()).view(output.sizes()));
  };
  call.outputs = {output};
  return start(c10d::OpType::SCATTER, std::move(call));
}

}  // namespace unisono
