#include "comm/c10d/hierarchy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>
#include <utility>

#include "comm/c10d/finish_sum.h"
#include "comm/c10d/tensors.h"
#include "comm/issuer/issued_group.h"

namespace unisono {
namespace {

// One message on its way. Its operations own it in turn.
struct Message {
  at::Tensor data;    // where it comes from and goes to
  at::Tensor blocks;  // a block per rank of the host: those of carriers hold the data, the others zeros
  at::Tensor slice;   // this rank's block
  ReduceOp op;
  std::chrono::milliseconds timeout;
};

EngineOp local(Work work, std::shared_ptr<Message> kept) {
  EngineOp op;
  op.staged = true;
  op.done = [work, kept]() mutable { return work.poll(); };
  op.check = [work]() mutable { work.wait(); };
  return op;
}

Buffer as_buffer(const at::Tensor& tensor) { return buffer_of(tensor, "a message between hosts"); }

}  // namespace

Hierarchy::Hierarchy(HostPlace place, c10::intrusive_ptr<c10d::ProcessGroup> across,
                     std::shared_ptr<ProcessGroup> collect, std::shared_ptr<ProcessGroup> spread)
    : place_(place), collect_(std::move(collect)), spread_(std::move(spread)) {
  if (across) across_ = std::make_unique<C10dEngine>(std::move(across));
}

EngineOp Hierarchy::all_reduce(const DataCall& call, std::chrono::milliseconds timeout) const {
  const at::NoGradGuard no_grad;
  const bool narrow = call.may_round && place_.hosts == 2;
  const auto message = std::make_shared<Message>();
  message->op = call.op;
  message->timeout = timeout;
  message->data = tensor_of(call.out);
  const auto count = static_cast<std::int64_t>(call.out.count);
  const std::int64_t carriers = place_.carriers, size = place_.local_size, length = (count + carriers - 1) / carriers;
  const bool widens = size_of(call.out.dtype) == 2 && !narrow;
  const auto options = message->data.options();
  if (!widens && size * length == count) {
    message->blocks = message->data;
  } else {
    message->blocks = at::zeros({size * length}, widens ? options.dtype(at::kFloat) : options);
    message->blocks.narrow(0, 0, count).copy_(message->data);
  }
  message->slice = collect_ ? at::empty({length}, message->blocks.options()) : message->blocks;

  const auto spread = [this, message, count](double) {
    const at::NoGradGuard none;
    CallOptions gather;
    gather.timeout = message->timeout;
    gather.tag.what = "from other hosts";
    EngineOp op =
        spread_ ? local(spread_->all_gather(as_buffer(message->blocks), as_buffer(message->slice), gather), message)
                : local(Work(), message);
    op.finish = [message, count](double) {
      const at::NoGradGuard inner;
      if (message->blocks.scalar_type() != message->data.scalar_type()) {
        return finish_sum(message->blocks.const_data_ptr(), as_buffer(message->data), 1);
      }
      if (message->blocks.data_ptr() != message->data.data_ptr())
        message->data.copy_(message->blocks.narrow(0, 0, count));
    };
    return op;
  };
  const auto cross = [this, message, spread](double) {
    const at::NoGradGuard none;
    if (!across_) {
      EngineOp op = local(Work(), message);
      op.then = spread;
      return op;
    }
    EngineOp op = across_->start({Operation::all_reduce, as_buffer(message->slice), {}, message->op}, message->timeout);
    op.staged = true;
    op.then = [finish = std::move(op.finish), spread](double divisor) {
      if (finish) finish(divisor);
      return spread(divisor);
    };
    op.finish = nullptr;
    return op;
  };
  AllReduceOptions reduce;
  reduce.op = call.op == ReduceOp::avg ? ReduceOp::sum : call.op;
  reduce.timeout = timeout;
  reduce.tag.what = "to other hosts";
  EngineOp op =
      collect_ ? local(collect_->reduce_scatter(as_buffer(message->slice), as_buffer(message->blocks), reduce), message)
               : local(Work(), message);
  op.then = cross;
  return op;
}

std::vector<DataCall> Hierarchy::parts_of(const DataCall& call) const {
  constexpr std::size_t kPart = 8 << 20;  // bytes: long enough for a link, short beside a large bucket
  const std::size_t multiple = 16 * static_cast<std::size_t>(place_.carriers);
  const std::size_t length = kPart / size_of(call.out.dtype) / multiple * multiple;
  return split(call, length);
}

void Hierarchy::abort(const Error& cause) const {
  if (collect_) collect_->abort(cause);
  if (spread_) spread_->abort(cause);
}

std::shared_ptr<ProcessGroup> make_hierarchical_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      c10::intrusive_ptr<c10d::ProcessGroup> across,
                                                      const HostPlace& place, std::shared_ptr<Store> store) {
  if (place.hosts < 2 || place.carriers < 1 || place.carriers > place.local_size || place.local_rank < 0 ||
      place.local_rank >= place.local_size || (place.local_rank < place.carriers) != (across != nullptr)) {
    throw Error(ErrorCode::invalid_argument,
                "make_hierarchical_group: hosts " + std::to_string(place.hosts) + ", local rank " +
                    std::to_string(place.local_rank) + " of " + std::to_string(place.local_size) + ", " +
                    std::to_string(place.carriers) + " carriers, " + (across ? "with" : "without") +
                    " a group across hosts; there must be two hosts or more, and a group across for the first "
                    "`carriers` of each");
  }
  std::shared_ptr<ProcessGroup> collect, spread;
  if (place.local_size > 1) {
    GroupOptions options{.rank = place.local_rank, .size = place.local_size, .store = std::move(store)};
    options.timeout = C10dEngine(group).info().timeout;
    options.prefix = "unisono/hierarchy/collect";
    collect = make_group("shm", options);
    options.prefix = "unisono/hierarchy/spread";
    spread = make_group("shm", options);
  }
  auto hierarchy = std::make_shared<const Hierarchy>(place, std::move(across), std::move(collect), std::move(spread));
  return std::make_shared<IssuedGroup>(std::make_unique<C10dEngine>(std::move(group), std::move(hierarchy)));
}

}  // namespace unisono
