#include "comm/shm/progress_thread.h"

#include <pthread.h>

#include <chrono>

#include "base/clock.h"
#include "comm/shm/engine.h"

namespace unisono::shm {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kTick = kMillisecond;
constexpr std::int64_t kIdleTick = 5 * kMillisecond;
constexpr std::int64_t kStayAwake = 100 * kMillisecond;

}  // namespace

void ProgressThread::start(std::shared_ptr<Engine> engine) {
  thread_ = std::thread([this, engine = std::move(engine)] {
    pthread_setname_np(pthread_self(), "uni-progress");
    run(*engine);
  });
}

void ProgressThread::note(std::int64_t now_ns) {
  active_ns_.store(now_ns, std::memory_order_relaxed);
  if (!deep_.load()) return;
  std::lock_guard lock(mutex_);
  wake_.notify_one();
}

void ProgressThread::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_.store(true);
    wake_.notify_one();
  }
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void ProgressThread::rest(std::int64_t ns) {
  std::unique_lock lock(mutex_);
  if (!stopping_.load()) wake_.wait_for(lock, std::chrono::nanoseconds(ns));
}

void ProgressThread::rest_deeply(Engine& engine) {
  std::unique_lock lock(mutex_);
  deep_.store(true);
  wake_.wait(lock, [&] { return stopping_.load() || engine.pending(); });
  deep_.store(false);
}

void ProgressThread::run(Engine& engine) {
  while (!stopping_.load()) {
    const std::int64_t quiet = now_ns() - active_ns_.load(std::memory_order_relaxed);
    if (!engine.pending()) {
      if (eager_ || quiet > kStayAwake) {
        rest_deeply(engine);
      } else {
        rest(kIdleTick);
      }
    } else if (engine.is_driven() || (!eager_ && quiet < kTick)) {
      rest(kTick);
    } else {
      engine.drive_a_little(kTick);
    }
  }
}

}  // namespace unisono::shm
