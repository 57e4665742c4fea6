// Calls in which each rank gives or keeps a block: gather and scatter of every kind.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <unisono/error.h>

#include <utility>

#include "base/kept_name.h"
#include "comm/c10d/tensors.h"
#include "comm/torch_backend/staging.h"
#include "comm/torch_backend/torch_backend.h"

namespace unisono {

void TorchBackend::add_all_gather(TorchWork::Call& call, const at::Tensor& out, const at::Tensor& in,
                                  const CallOptions& options) {
  const at::Tensor from = contiguous_input(in, "all_gather");
  const at::Tensor to = contiguous_output(call, out, "all_gather", false);
  call.parts.push_back(group_->all_gather(moved_buffer(to, "all_gather"), moved_buffer(from, "all_gather"), options));
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
  add_all_gather(call, flat, input, within(options.timeout));
  call.outputs = outputs[0];
  return start(c10d::OpType::ALLGATHER, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  TorchWork::Call call;
  add_all_gather(call, output, input, within(options.timeout));
  return start(c10d::OpType::_ALLGATHER_BASE, std::move(call));
}

// Of different sizes, which all ranks know from their outputs: everybody's tensor on its own.
TorchBackend::WorkPtr TorchBackend::gather_by_broadcasts(const Tensors& outputs, const at::Tensor& input,
                                                         std::chrono::milliseconds timeout) {
  const at::NoGradGuard no_grad;
  const at::Tensor& own = outputs[static_cast<std::size_t>(rank_)];
  check_alike({own}, input, "all_gather");
  own.detach().copy_(input.reshape(own.sizes()));
  TorchWork::Call call;
  for (int r = 0; r < size_; ++r) {
    const at::Tensor data = contiguous_output(call, outputs[static_cast<std::size_t>(r)], "all_gather", r == rank_);
    call.parts.push_back(group_->broadcast(moved_buffer(data, "all_gather"), r, within(timeout)));
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
    add_all_gather(call, flat_output(call, of_all, inputs[i], "all_gather_coalesced"), inputs[i],
                   within(options.timeout));
  }
  call.outputs.clear();
  for (const auto& list : outputs) call.outputs.insert(call.outputs.end(), list.begin(), list.end());
  return start(c10d::OpType::ALLGATHER_COALESCED, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs, "all_gather");
  TorchWork::Call call;
  for (std::size_t i = 0; i < outputs.size(); ++i) add_all_gather(call, outputs[i], inputs[i], within(options.timeout));
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
  CallOptions how = within(options.timeout);
  how.tag.what = kept_name("gather to rank " + std::to_string(options.rootRank));
  add_all_gather(call, flat, input, how);
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
                     reduction(options.reduceOp, output, "reduce_scatter", options.timeout));
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
  const auto how = reduction(options.reduceOp, all, "reduce_scatter", options.timeout);
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
                     reduction(options.reduceOp, output, "reduce_scatter", options.timeout));
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::ReduceScatterOptions& options) {
  check_pairs(outputs, inputs, "reduce_scatter");
  TorchWork::Call call;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    add_reduce_scatter(call, outputs[i], multiplied(inputs[i], options.reduceOp, false),
                       reduction(options.reduceOp, outputs[i], "reduce_scatter", options.timeout));
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
  CallOptions how = within(options.timeout);
  how.tag.what = "scatter";
  call.parts.push_back(group_->broadcast(moved_buffer(flat, "scatter"), static_cast<int>(options.rootRank), how));
  call.finish = [output, flat, rank = rank_] {
    const at::NoGradGuard no_grad;
    output.detach().copy_(flat.narrow(0, rank * output.numel(), output.numel()).view(output.sizes()));
  };
  call.outputs = {output};
  return start(c10d::OpType::SCATTER, std::move(call));
}

}  // namespace unisono
