#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace unisono::differential {

/// Calls `expired` from a thread of its own when nobody has called `feed` for `limit`.
class Watchdog {
 public:
  Watchdog(std::chrono::nanoseconds limit, std::function<void()> expired)
      : thread_([this, limit, expired = std::move(expired)] {
          std::unique_lock lock(mutex_);
          while (!stop_) {
            fed_ = false;
            if (!changed_.wait_for(lock, limit, [&] { return stop_ || fed_; })) return expired();
          }
        }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void feed() {
    {
      std::lock_guard lock(mutex_);
      fed_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  bool fed_ = false;
  std::thread thread_;
};

}  // namespace unisono::differential
