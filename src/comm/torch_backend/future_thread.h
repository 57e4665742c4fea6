#pragma once

#include <memory>
#include <thread>

#include <c10/util/intrusive_ptr.h>

namespace unisono {

class TorchWork;

/// The thread "uni-futures" of a torch backend: waits for calls whose futures somebody holds, in the order they were asked
/// for. It starts with the first of them, so programs that only wait never have it.
class FutureThread {
 public:
  FutureThread();
  /// Calls still being watched are completed by the thread, which then ends by itself.
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
