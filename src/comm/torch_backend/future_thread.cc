#include "comm/torch_backend/future_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/torch_backend/torch_work.h"

namespace unisono {

struct FutureThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<TorchWork>> queue;
  std::vector<std::thread> threads;
  int idle = 0;      // wait for something to do
  bool led = false;  // one thread waits for a call
  int in_callbacks = 0;
  bool stop = false;

  // With the mutex held: somebody must wait for the first call in the queue.
  void need_leader(const std::shared_ptr<State>& self) {
    if (led || queue.empty()) return;
    if (idle == 0 && !stop) {
      threads.emplace_back([self] { run(self); });
    } else {
      changed.notify_all();
    }
  }
};

FutureThread::FutureThread() : state_(std::make_shared<State>()) {}

// A future's callback may run Python, and whoever destroys the backend may hold Python's lock: waiting for a busy
// thread could wait for ever. Idle ones end at once and are joined.
FutureThread::~FutureThread() {
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  const bool busy = state_->led || state_->in_callbacks > 0 || !state_->queue.empty();
  std::vector<std::thread> threads = std::move(state_->threads);
  lock.unlock();
  for (std::thread& thread : threads) busy ? thread.detach() : thread.join();
}

void FutureThread::watch(c10::intrusive_ptr<TorchWork> work) {
  const std::lock_guard lock(state_->mutex);
  state_->queue.push_back(std::move(work));
  state_->need_leader(state_);
}

void FutureThread::run(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "uni-futures");
  std::unique_lock lock(state->mutex);
  while (true) {
    ++state->idle;
    state->changed.wait(
        lock, [&] { return (state->stop && state->queue.empty()) || (!state->led && !state->queue.empty()); });
    --state->idle;
    if (state->queue.empty()) return;
    auto work = std::move(state->queue.front());
    state->queue.pop_front();
    state->led = true;
    lock.unlock();
    work->await_parts();
    lock.lock();
    state->led = false;
    ++state->in_callbacks;
    state->need_leader(state);
    lock.unlock();
    work->drive();
    work.reset();
    lock.lock();
    --state->in_callbacks;
  }
}

}  // namespace unisono
