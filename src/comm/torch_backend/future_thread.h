#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace unisono {

class TorchWork;

/// The threads "uni-futures" of a torch backend: wait for calls whose futures somebody holds, in the order they were
/// asked for, and run the futures' callbacks. One of them waits at a time. Callbacks may wait for other futures of the
/// same backend, as torch's PowerSGD hook does: whoever runs them has left the waiting to another thread, which is
/// started when there is none. The first starts with the first future, so programs that only wait never have any.
class FutureThread {
 public:
  FutureThread();
  /// Calls still being watched are completed by the threads, which then end by themselves.
  ~FutureThread();
  FutureThread(const FutureThread&) = delete;
  FutureThread& operator=(const FutureThread&) = delete;

  void watch(c10::intrusive_ptr<TorchWork> work);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace unisono
