#include "comm/torch_backend/torch_work.h"

#include <ATen/core/ivalue_inl.h>
#include <unisono/error.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace unisono {
namespace {

// The range that a profiler shows; null for what has no range of its own.
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

}  // namespace

TorchWork::TorchWork(int rank, c10d::OpType type, Call call, std::weak_ptr<FutureThread> thread)
    : c10d::Work(rank, type, title_of(type), call.outputs),
      parts_(std::move(call.parts)),
      outputs_(std::move(call.outputs)),
      finish_(std::move(call.finish)),
      message_(std::move(call.message)),
      thread_(std::move(thread)) {}

bool TorchWork::isCompleted() {
  if (!std::all_of(parts_.begin(), parts_.end(), [](unisono::Work& part) { return part.poll(); })) return false;
  settle();
  return true;
}

bool TorchWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr TorchWork::exception() const {
  const std::lock_guard lock(mutex_);
  return exception_;
}

std::vector<at::Tensor> TorchWork::result() { return outputs_; }

int TorchWork::sourceRank() const {
  if (!message_) throw Error(ErrorCode::invalid_argument, "unisono: only a receive has a source rank");
  return message_->peer();
}

void TorchWork::await_parts() noexcept {
  for (auto& part : parts_) {
    try {
      part.wait();
    } catch (...) {  // kept by the part; settle() reads it there
    }
  }
}

void TorchWork::drive() noexcept {
  await_parts();
  settle();
}

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  if (timeout <= kNoTimeout) {
    drive();
  } else {
    getFuture();  // lets the future thread do the waiting, so that this one can stop waiting earlier
    std::unique_lock lock(mutex_);
    if (!cv_.wait_for(lock, bounded(timeout), [this] { return completed_; }))
      throw Error(ErrorCode::timeout,
                  "unisono: rank " + std::to_string(rank_) + " waited " + std::to_string(timeout.count()) + " ms for " +
                      c10d::opTypeToString(opType_) +
                      ", which has not ended. It goes on; wait again, or give the call a longer timeout.");
  }
  if (auto error = exception()) std::rethrow_exception(error);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  bool ended = false;
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    ended = completed_;
  }
  if (ended) {
    complete_future();
  } else if (auto thread = thread_.lock()) {
    thread->watch(c10::intrusive_ptr<TorchWork>::unsafe_reclaim_from_nonowning(this));
  } else {
    drive();  // the backend is gone, and its thread with it
  }
  const std::lock_guard lock(mutex_);
  return future_;
}

// The waiter, a poller and the future thread may all come here; one of them does it, the others wait for that.
void TorchWork::settle() {
  std::call_once(settled_once_, [this] {
    std::exception_ptr error;
    for (auto& part : parts_)
      if (!error) error = part.error();
    try {
      if (!error && finish_) finish_();
    } catch (...) {
      error = std::current_exception();
    }
    finish_ = nullptr;
    finish(error);
  });
  complete_future();
}

void TorchWork::complete_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    if (!completed_ || !future_ || std::exchange(future_completed_, true)) return;
    future = future_;
    error = exception_;
  }
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
}

}  // namespace unisono
