#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

namespace unisono::shm {

class Engine;

/// The thread that guarantees that a call which was made completes although nobody waits for it.
/// While nothing is pending it sleeps: with a timer for a while after the last call, so that the next calls need not
/// wake it, then deeply. While calls are pending and nobody drives them, it does. A thread in wait() does better, so it
/// leaves the work to that one.
class ProgressThread {
 public:
  explicit ProgressThread(bool eager) : eager_(eager) {}
  ~ProgressThread() { stop(); }

  void start(std::shared_ptr<Engine> engine);
  /// A call was made. Costs an atomic store, unless the thread is in deep sleep.
  void note(std::int64_t now_ns);
  /// Returns when the thread has ended; when called on that thread, it ends after returning.
  void stop();

 private:
  void run(Engine& engine);
  void rest(std::int64_t ns);
  void rest_deeply(Engine& engine);

  const bool eager_;
  std::atomic<std::int64_t> active_ns_{0};
  std::atomic<bool> deep_{false};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace unisono::shm
