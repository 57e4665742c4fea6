#pragma once

#include <unisono/work.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace unisono {

/// A call whose second half can be made only when the first has ended, which must have been well: by the next thread
/// that polls or waits, so some thread must. What `next` throws is the call's error.
/// *Threads*: any, several at once.
class TwoHalves final : public WorkState {
 public:
  using Next = std::function<std::vector<unisono::Work>()>;

  TwoHalves(unisono::Work first, Next next) : first_(std::move(first)), next_(std::move(next)) {}
  bool poll() override {
    if (!first_.poll()) return false;
    go_on();
    return std::all_of(second_.begin(), second_.end(), [](unisono::Work& part) { return part.poll(); });
  }
  void wait() override {
    wait_for(first_);
    go_on();
    for (auto& part : second_) wait_for(part);
  }
  std::exception_ptr error() const override {
    if (auto error = first_.error()) return error;
    if (error_) return error_;
    for (const auto& part : second_)
      if (auto error = part.error()) return error;
    return nullptr;
  }
  const ControlRecord& control() const override { return none_; }
  bool withheld() const override { return false; }

 private:
  static void wait_for(unisono::Work& part) {
    try {
      part.wait();
    } catch (...) {  // kept by the part; error() reads it there
    }
  }
  void go_on() {
    std::call_once(once_, [this] {
      try {
        if (!first_.error()) second_ = next_();
      } catch (...) {
        error_ = std::current_exception();
      }
      next_ = nullptr;
    });
  }

  unisono::Work first_;
  Next next_;
  std::once_flag once_;
  std::vector<unisono::Work> second_;
  std::exception_ptr error_;
  ControlRecord none_;
};

}  // namespace unisono
