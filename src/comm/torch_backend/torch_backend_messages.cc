#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <unisono/error.h>
#include <unisono/torch_backend.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/c10d/tensors.h"
#include "comm/torch_backend/beside_work.h"
#include "comm/torch_backend/staging.h"
#include "comm/torch_backend/torch_backend.h"

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kUnset(-1);  // as c10d's options have it

// How many rows of `tensor` each block has: these, or equally many.
std::vector<int64_t> block_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows, int size,
                                const char* name) {
  const std::int64_t all = tensor.dim() > 0 ? tensor.size(0) : 0;
  std::vector<int64_t> out = rows;
  if (out.empty()) out.assign(static_cast<std::size_t>(size), all / size);
  check_count(out.size(), size, "all_to_all");
  const std::int64_t sum = std::accumulate(out.begin(), out.end(), std::int64_t{0});
  if (sum != all || *std::min_element(out.begin(), out.end()) < 0)
    throw Error(ErrorCode::invalid_argument, std::string("unisono all_to_all: the ") + name + " has " +
                                                 std::to_string(all) + " rows and its split sizes add up to " +
                                                 std::to_string(sum));
  return out;
}

// The same in bytes.
std::vector<int64_t> block_bytes(const at::Tensor& tensor, const std::vector<int64_t>& rows, int size,
                                 const char* name) {
  std::vector<int64_t> out = block_rows(tensor, rows, size, name);
  const auto row =
      static_cast<int64_t>(tensor.size(0) > 0 ? tensor.nbytes() / static_cast<std::size_t>(tensor.size(0)) : 0);
  for (int64_t& block : out) block *= row;
  return out;
}

// Gloo refuses some types even where it only moves them.
at::Tensor as_bytes(const at::Tensor& contiguous) { return contiguous.detach().reshape({-1}).view(at::kByte); }

}  // namespace

// Tags of torch.distributed are not negative; negative ones are for what the backend sends by itself.
std::int64_t TorchBackend::next_exchange() {
  return std::numeric_limits<std::int64_t>::min() + exchanges_.fetch_add(1);
}

PointToPoint& TorchBackend::messages(const char* operation) const {
  if (post_ != nullptr) return *post_;
  throw Error(ErrorCode::invalid_argument, std::string("unisono ") + operation + ": the group's transport, " +
                                               group_->name() + ", has no messages between two ranks");
}

TorchBackend::WorkPtr TorchBackend::send(Tensors& tensors, int to, int tag) {
  if (post_ == nullptr && beside_) return beside_->send(tensors, to, tag);
  const at::Tensor data = contiguous_input(only(tensors, "send"), "send");
  TorchWork::Call call;
  call.parts.emplace_back(messages("send").send(moved_buffer(data, "send"), to, tag, timeout_of(kUnset)));
  call.outputs = tensors;
  return start(c10d::OpType::SEND, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::receive(const at::Tensor& tensor, int from, int tag, c10d::OpType type) {
  TorchWork::Call call;
  const at::Tensor data = contiguous_output(call, tensor, "recv", false);
  call.message = messages("recv").receive(moved_buffer(data, "recv"), from, tag, timeout_of(kUnset));
  call.parts.emplace_back(call.message);
  call.outputs = {tensor};
  return start(type, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::recv(Tensors& tensors, int from, int tag) {
  if (post_ == nullptr && beside_) return beside_->recv(tensors, from, tag);
  if (from < 0) throw Error(ErrorCode::invalid_argument, "unisono recv: there is no rank " + std::to_string(from));
  return receive(only(tensors, "recv"), from, tag, c10d::OpType::RECV);
}

TorchBackend::WorkPtr TorchBackend::recvAnysource(Tensors& tensors, int tag) {
  if (post_ == nullptr && beside_) return beside_->recvAnysource(tensors, tag);
  return receive(only(tensors, "recv"), PointToPoint::kAnyRank, tag, c10d::OpType::RECVANYSOURCE);
}

// Block r goes to rank r as a message of its own, so blocks may have any sizes.
void TorchBackend::exchange(TorchWork::Call& call, const Tensors& outputs, const Tensors& inputs,
                            std::chrono::milliseconds timeout) {
  PointToPoint* const post = size_ > 1 ? &messages("all_to_all") : nullptr;  // a world of one sends none
  const std::int64_t tag = next_exchange();
  const auto limit = timeout_of(timeout);
  const auto own = static_cast<std::size_t>(rank_);
  for (const auto* list : {&outputs, &inputs})
    for (const auto& tensor : *list) check_dense_cpu(tensor, "all_to_all");
  if (outputs[own].numel() != inputs[own].numel() || outputs[own].scalar_type() != inputs[own].scalar_type())
    throw Error(ErrorCode::invalid_argument, "unisono all_to_all: rank " + std::to_string(rank_) + " gives itself " +
                                                 std::to_string(inputs[own].numel()) + " elements and takes " +
                                                 std::to_string(outputs[own].numel()) +
                                                 " from itself; they must be equal");
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const at::Tensor to = contiguous_output(call, outputs[static_cast<std::size_t>(r)], "all_to_all", false);
    call.parts.emplace_back(post->receive(moved_buffer(to, "all_to_all"), r, tag, limit));
  }
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const at::Tensor from = contiguous_input(inputs[static_cast<std::size_t>(r)], "all_to_all");
    call.parts.emplace_back(post->send(moved_buffer(from, "all_to_all"), r, tag, limit));
  }
  const at::NoGradGuard no_grad;
  outputs[own].detach().copy_(inputs[own].reshape(outputs[own].sizes()));
}

TorchBackend::WorkPtr TorchBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  const bool equal = output_splits.empty() && input_splits.empty();
  TorchWork::Call call;
  const at::Tensor from = contiguous_input(input, "all_to_all");
  const at::Tensor to = contiguous_output(call, output, "all_to_all", false);
  if (equal) {
    call.parts.push_back(
        group_->all_to_all(moved_buffer(to, "all_to_all"), moved_buffer(from, "all_to_all"), within(options.timeout)));
  } else if (post_ == nullptr && beside_) {
    auto out_bytes = block_bytes(to, output_splits, size_, "output"),
         in_bytes = block_bytes(from, input_splits, size_, "input");
    at::Tensor out = as_bytes(to), in = as_bytes(from);
    call.parts.emplace_back(
        std::make_shared<BesideWork>(beside_->alltoall_base(out, in, out_bytes, in_bytes, options)));
  } else {
    exchange(call, to.split_with_sizes(block_rows(to, output_splits, size_, "output")),
             from.split_with_sizes(block_rows(from, input_splits, size_, "input")), options.timeout);
  }
  call.outputs = {output};
  return start(c10d::OpType::ALLTOALL_BASE, std::move(call));
}

// Gloo has no all-to-all of lists.
TorchBackend::WorkPtr TorchBackend::all_to_all_in_one(const Tensors& outputs, const Tensors& inputs,
                                                      const c10d::AllToAllOptions& options) {
  check_count(outputs.size(), size_, "all_to_all");
  check_count(inputs.size(), size_, "all_to_all");
  const at::NoGradGuard no_grad;
  std::vector<int64_t> to, from;
  Tensors flat;
  for (const auto& tensor : outputs) {
    check_dense_cpu(tensor, "all_to_all");
    to.push_back(static_cast<int64_t>(tensor.nbytes()));
  }
  for (const auto& tensor : inputs) {
    flat.push_back(as_bytes(contiguous_input(tensor, "all_to_all")));
    from.push_back(flat.back().numel());
  }
  at::Tensor input = at::cat(flat);
  at::Tensor output = at::empty({std::accumulate(to.begin(), to.end(), std::int64_t{0})}, input.options());
  TorchWork::Call call;
  call.parts.emplace_back(std::make_shared<BesideWork>(
      beside_->alltoall_base(output, input, to, from, options)));  // which may take the sizes
  call.finish = [output, outputs] {
    const at::NoGradGuard none;
    std::int64_t begin = 0;
    for (const auto& tensor : outputs) {
      const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
      tensor.detach().copy_(output.narrow(0, begin, bytes).clone().view(tensor.scalar_type()).view(tensor.sizes()));
      begin += bytes;
    }
  };
  call.outputs = outputs;
  return start(c10d::OpType::ALLTOALL, std::move(call));
}

TorchBackend::WorkPtr TorchBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  if (post_ == nullptr && beside_) return all_to_all_in_one(outputs, inputs, options);
  check_count(outputs.size(), size_, "all_to_all");
  check_count(inputs.size(), size_, "all_to_all");
  TorchWork::Call call;
  exchange(call, outputs, inputs, options.timeout);
  call.outputs = outputs;
  return start(c10d::OpType::ALLTOALL, std::move(call));
}

c10::intrusive_ptr<c10d::Backend> TorchBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& options) {
  if (post_ == nullptr && size_ > 1)
    throw Error(ErrorCode::invalid_argument, "unisono split: the group " + group_->name() +
                                                 " spans hosts; make the group with torch.distributed.new_group");
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  const auto limit = options ? options->timeout : options_->timeout;
  return make_torch_backend(make_group_on_store(store, static_cast<int>(mine - ranks.begin()),
                                                static_cast<int>(ranks.size()), std::chrono::duration<double>(limit)));
}

}  // namespace unisono
