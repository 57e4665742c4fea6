#pragma once

#include <unisono/work.h>

#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/point_to_point.h"
#include "comm/torch_backend/future_thread.h"

namespace unisono {

/// One or more unisono calls as one c10d Work. Whoever waits does the work in the calling thread; only when somebody
/// asks for the future does a thread of the backend wait in its place, because futures are waited for without polling.
class TorchWork final : public c10d::Work {
 public:
  struct Call {
    std::vector<unisono::Work> parts;
    std::vector<at::Tensor> outputs;             ///< the future's value
    std::function<void()> finish = nullptr;      ///< copies results to where the caller wants them
    std::shared_ptr<Message> message = nullptr;  ///< of a receive: one of the parts, which knows its sender
  };

  TorchWork(int rank, c10d::OpType type, Call call, std::weak_ptr<FutureThread> thread);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  int sourceRank() const override;
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Waits for all parts; never throws.
  void await_parts() noexcept;
  /// Waits for all parts and settles, which runs the future's callbacks; never throws. Called by a future thread.
  void drive() noexcept;

 private:
  void settle();
  void complete_future();

  std::vector<unisono::Work> parts_;
  std::vector<at::Tensor> outputs_;
  std::function<void()> finish_;
  std::shared_ptr<Message> message_;
  std::weak_ptr<FutureThread> thread_;
  std::once_flag settled_once_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // both guarded by mutex_
  bool future_completed_ = false;
};

}  // namespace unisono
