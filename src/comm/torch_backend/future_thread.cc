#include "comm/torch_backend/future_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "comm/torch_backend/torch_work.h"

namespace unisono {

struct FutureThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<TorchWork>> queue;
  std::thread thread;
  bool busy = false;
  bool stop = false;
};

FutureThread::FutureThread() : state_(std::make_shared<State>()) {}

// A future's callback may run Python, and whoever destroys the backend may hold Python's lock: waiting for a busy thread
// could wait for ever. An idle one ends at once and is joined.
FutureThread::~FutureThread() {
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  if (!state_->thread.joinable()) return;
  if (state_->busy || !state_->queue.empty()) {
    state_->thread.detach();
    return;
  }
  std::thread idle = std::move(state_->thread);
  lock.unlock();
  idle.join();
}

void FutureThread::watch(c10::intrusive_ptr<TorchWork> work) {
  const std::lock_guard lock(state_->mutex);
  state_->queue.push_back(std::move(work));
  if (!state_->thread.joinable()) state_->thread = std::thread([state = state_] { run(state); });
  state_->changed.notify_all();
}

void FutureThread::run(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "uni-futures");
  std::unique_lock lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return state->stop || !state->queue.empty(); });
    if (state->queue.empty()) return;
    auto work = std::move(state->queue.front());
    state->queue.pop_front();
    state->busy = true;
    lock.unlock();
    work->drive();
    work.reset();
    lock.lock();
    state->busy = false;
  }
}

}  // namespace unisono
