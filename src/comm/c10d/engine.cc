#include "comm/c10d/engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "comm/c10d/notice_board.h"
#include "comm/c10d/stream_fence.h"
#include "comm/c10d/tensors.h"
#include "comm/c10d/tree_all_reduce.h"
#include "comm/finish_sum.h"

namespace unisono {
namespace {

Buffer as_bytes(Buffer buffer) {
  buffer.count = buffer.bytes();
  buffer.dtype = Dtype::u8;
  return buffer;
}

// How a reduction travels. Sum of bool is or; as u8 with values 0 and 1 that is the maximum.
c10d::ReduceOp wire_op(ReduceOp op, Dtype dtype) {
  if (dtype == Dtype::boolean) {
    switch (op) {
      case ReduceOp::product:
      case ReduceOp::min:
      case ReduceOp::bit_and:
        return c10d::ReduceOp::MIN;
      case ReduceOp::bit_xor:
        return c10d::ReduceOp::BXOR;
      default:
        return c10d::ReduceOp::MAX;
    }
  }
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return c10d::ReduceOp::SUM;
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::bit_and:
      return c10d::ReduceOp::BAND;
    case ReduceOp::bit_or:
      return c10d::ReduceOp::BOR;
    case ReduceOp::bit_xor:
      return c10d::ReduceOp::BXOR;
  }
  throw Error(ErrorCode::internal, "unknown reduce op");
}

at::Tensor wire_tensor(Buffer buffer) {
  if (buffer.dtype == Dtype::boolean) return tensor_of(as_bytes(std::move(buffer)));
  const bool half = buffer.dtype == Dtype::f16 || buffer.dtype == Dtype::bf16;
  const at::Tensor tensor = tensor_of(buffer);
  return half ? tensor.to(at::kFloat) : tensor;
}

// Of CPU memory a copy, for Gloo cannot be stopped; what works on streams is.
at::Tensor own(const at::Tensor& tensor) { return tensor.is_cpu() ? tensor.clone() : tensor; }
at::Tensor own_empty(const at::Tensor& tensor) { return tensor.is_cpu() ? at::empty_like(tensor) : tensor; }

// What came in `wire` to where it belongs.
void bring_home(EngineOp& op, const at::Tensor& out, const at::Tensor& wire) {
  if (wire.data_ptr() == out.data_ptr()) return;
  op.finish = [out, wire](double) {
    const at::NoGradGuard no_grad;
    at::Tensor(out).copy_(wire);
  };
}

void divide(at::Tensor& tensor, double divisor) {
  if (divisor == 0) {
    tensor.zero_();
  } else if (divisor != 1) {
    tensor.div_(divisor);
  }
}

// Divides in the wire's precision and brings the result home when the wire's memory is another.
std::function<void(double)> into(Buffer out, at::Tensor wire) {
  return [out = std::move(out), wire = std::move(wire)](double divisor) mutable {
    const at::NoGradGuard no_grad;
    const bool elsewhere = wire.data_ptr() != out.data;
    if (out.device.kind == Device::Kind::cpu && is_defined(ReduceOp::avg, out.dtype)) {
      if (elsewhere || divisor != 1) finish_sum(wire.data_ptr(), out, divisor);
      return;
    }
    divide(wire, divisor);
    if (elsewhere) tensor_of(out).copy_(wire);
  };
}

// A group with one backend per device has no default one, or one that is called "undefined".
std::string engine_name(c10d::ProcessGroup& group) {
  for (const auto device : {c10::kCPU, c10::kCUDA})
    if (group.hasBackendForDeviceType(device)) return "c10d/" + group.getBackend(device)->getBackendName();
  return "c10d/" + group.getBackendName();
}

std::chrono::milliseconds engine_timeout(c10d::ProcessGroup& group) {
  try {
    for (const auto device : {c10::kCPU, c10::kCUDA})
      if (group.hasBackendForDeviceType(device)) return group.getBackend(device)->getBackendOptions()->timeout;
    return group.getDefaultBackend()->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return kProcessGroupDefaultTimeout;
  }
}

}  // namespace

EngineOp in_flight(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> memory) {
  if (!work) throw Error(ErrorCode::internal, "the engine returned no work");
  EngineOp out;
  try {
    const auto future = work->getFuture();
    if (future) {
      out.done = [future, memory] { return future->completed(); };
      out.when_done = [future](std::function<void()> call) {
        future->addCallback([call = std::move(call)](c10::ivalue::Future&) { call(); });
      };
    }
  } catch (const c10::Error&) {  // an engine without futures is polled
  }
  if (!out.done) out.done = [work, memory] { return work->isCompleted(); };
  out.check = [work] { work->wait(); };
  return out;
}

C10dEngine::C10dEngine(c10::intrusive_ptr<c10d::ProcessGroup> group, bool ordered)
    : Engine({.name = (ordered ? "ordered/" : "") + engine_name(*group),
              .rank = group->getRank(),
              .size = group->getSize(),
              .timeout = engine_timeout(*group),
              .thread = "uni-c10d"}),
      group_(std::move(group)),
      ordered_(ordered),
      control_device_(group_->hasBackendForDeviceType(c10::kCPU) || !group_->hasBackendForDeviceType(c10::kCUDA)
                          ? c10::Device(c10::kCPU)
                          : c10::Device(c10::kCUDA, c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index())) {}

StreamFence C10dEngine::fence(const Device& device) const { return stream_fence(device); }

std::unique_ptr<NoticeBoard> C10dEngine::notice_board() {
  return std::make_unique<StoreNoticeBoard>(group_->getStore(), info().rank, info().size);
}

std::vector<DataCall> C10dEngine::parts_of(const DataCall& call) const {
  const bool splits = call.operation == Operation::all_reduce || call.operation == Operation::broadcast;
  if (!splits || call.out.device.kind != Device::Kind::cpu) return {call};
  // Engines' all_gathers may send and receive in turns; several of them at once fill both directions.
  constexpr std::size_t kGathered = 1 << 20;
  // One is copied while another is on its way.
  constexpr std::size_t kPart = 8 << 20;
  const bool tree = call.operation == Operation::all_reduce && by_tree(call);
  // All-to-alls of parts would meet on the links: 1.76 s in place of 1.63 for 100 MB on four hosts.
  if (tree && group_->getSize() > 2) return {call};
  return split(call, (tree ? kGathered : kPart) / size_of(call.out.dtype));
}

bool C10dEngine::serves(Device::Kind kind) const {
  return group_->hasBackendForDeviceType(kind == Device::Kind::cpu ? c10::kCPU : c10::kCUDA);
}

EngineOp C10dEngine::start(const DataCall& call, Milliseconds timeout) {
  const at::NoGradGuard no_grad;
  switch (call.operation) {
    case Operation::all_reduce:
      return all_reduce(call, timeout);
    case Operation::reduce_scatter:
      return reduce_scatter(call, timeout);
    case Operation::broadcast: {
      const at::Tensor out = tensor_of(as_bytes(call.out));
      const bool root = call.root == info().rank;
      std::vector<at::Tensor> data{root ? own(out) : own_empty(out)};
      auto options = with<c10d::BroadcastOptions>(timeout);
      options.rootRank = call.root;
      auto op = in_flight(group_->broadcast(data, options), data);
      if (!root) bring_home(op, out, data[0]);
      return op;
    }
    case Operation::all_gather: {
      const at::Tensor out = tensor_of(as_bytes(call.out));
      at::Tensor to = own_empty(out), in = tensor_of(as_bytes(call.in)).clone();  // it may lie inside `out`
      auto op = in_flight(group_->all_gather_single(to, in, with<c10d::AllgatherOptions>(timeout)), {to, in});
      bring_home(op, out, to);
      return op;
    }
    case Operation::all_to_all: {
      const at::Tensor out = tensor_of(as_bytes(call.out));
      at::Tensor to = own_empty(out), in = own(tensor_of(as_bytes(call.in)));
      std::vector<std::int64_t> equal;
      auto op =
          in_flight(group_->all_to_all_single(to, in, equal, equal, with<c10d::AllToAllOptions>(timeout)), {to, in});
      bring_home(op, out, to);
      return op;
    }
    case Operation::barrier:
    case Operation::allocate:
      break;  // the header was all of it
  }
  throw Error(ErrorCode::internal, std::string(to_string(call.operation)) + " moves no data");
}

// In our order where that is asked for; of 16-bit sums those that are large enough for half the bytes to be worth a
// second message.
bool C10dEngine::by_tree(const DataCall& call) const {
  constexpr std::size_t kTwice = 16 * 1024;
  if (ordered_ && call.out.device.kind == Device::Kind::cpu) return true;
  const bool adds = call.op == ReduceOp::sum || call.op == ReduceOp::avg;
  return adds && size_of(call.out.dtype) == 2 && call.out.bytes() >= kTwice;
}

EngineOp C10dEngine::all_reduce(const DataCall& call, Milliseconds timeout) const {
  if (by_tree(call)) return tree_all_reduce(group_, call, timeout);
  const at::Tensor wire = wire_tensor(call.out);
  std::vector<at::Tensor> data{wire.data_ptr() == call.out.data ? own(wire) : wire};
  auto options = with<c10d::AllreduceOptions>(timeout);
  options.reduceOp = wire_op(call.op, call.out.dtype);
  auto op = in_flight(group_->allreduce(data, options), data);
  op.finish = into(call.out, data[0]);
  return op;
}

EngineOp C10dEngine::reduce_scatter(const DataCall& call, Milliseconds timeout) const {
  if (call.in.device.kind == Device::Kind::cpu) return tree_reduce_scatter(group_, call, timeout);
  at::Tensor in = wire_tensor(call.in);
  at::Tensor out = at::empty({static_cast<std::int64_t>(call.out.count)}, in.options());
  auto options = with<c10d::ReduceScatterOptions>(timeout);
  options.reduceOp = wire_op(call.op, call.out.dtype);
  auto op = in_flight(group_->reduce_scatter_single(out, in, options), {out, in});
  if (call.out.dtype == Dtype::boolean) {
    op.finish = into(as_bytes(call.out), out);
  } else {
    op.finish = into(call.out, out);
  }
  return op;
}

EngineOp C10dEngine::gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) {
  const at::NoGradGuard no_grad;
  at::Tensor host = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
  std::memcpy(host.data_ptr(), block, bytes);
  at::Tensor in = host.to(control_device_);
  at::Tensor out = at::empty({static_cast<std::int64_t>(bytes) * group_->getSize()}, in.options());
  auto op = in_flight(group_->all_gather_single(out, in, with<c10d::AllgatherOptions>(timeout)), {out, in});
  op.gathered = [out] {
    const at::Tensor all = out.cpu();
    const auto* data = all.const_data_ptr<std::uint8_t>();
    return std::vector<std::uint8_t>(data, data + all.numel());
  };
  return op;
}

}  // namespace unisono
