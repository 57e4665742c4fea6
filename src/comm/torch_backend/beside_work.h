#pragma once

#include <unisono/work.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

namespace unisono {

/// A call of the backend beside ours, waited for in the time that is left to it, 0: its own. Once only, for Gloo takes
/// a second wait for the same message as one for another message.
class BesideWork final : public WorkState {
 public:
  explicit BesideWork(c10::intrusive_ptr<c10d::Work> work, std::chrono::milliseconds limit = kNoTimeout)
      : work_(std::move(work)), limit_(limit) {}
  bool poll() override { return work_->isCompleted(); }
  void wait() override {
    std::call_once(waited_, [this] {
      try {
        work_->wait(limit_);
      } catch (const std::exception&) {  // kept by the work
      }
    });
  }
  std::exception_ptr error() const override { return work_->exception(); }
  const ControlRecord& control() const override { return none_; }
  bool withheld() const override { return false; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::chrono::milliseconds limit_;
  std::once_flag waited_;
  ControlRecord none_;
};

}  // namespace unisono
