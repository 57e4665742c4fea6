#pragma once

#include <unisono/process_group.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "bindings.h"

namespace unisono::python {

/// With Python's lock held: whether this thread is one of an engine that came to run a callback, and not Python's own.
inline bool on_an_engines_thread() {
  const py::error_scope pending;  // an object may be on its way out because of an exception
  const py::object thread = py::module_::import("threading").attr("current_thread")();
  return py::type::of(thread).attr("__name__").cast<std::string>() == "_DummyThread";
}

/// Destroys the group on the main thread, as soon as that runs Python again. With Python's lock held.
inline void destroy_on_main_thread(std::shared_ptr<ProcessGroup> group) {
  auto* handed_over = new std::shared_ptr<ProcessGroup>(std::move(group));
  const auto destroy = [](void* pointer) {
    const py::gil_scoped_release release;
    delete static_cast<std::shared_ptr<ProcessGroup>*>(pointer);
    return 0;
  };
  while (Py_AddPendingCall(destroy, handed_over) != 0) {  // its queue is full
    const py::gil_scoped_release release;
    std::this_thread::yield();
  }
}

/// The same group, destroyed without Python's lock whoever lets go of it last. A group's destructor waits for its
/// threads, and those may be waiting for the lock: to drop the last reference to a tensor that Python has seen, one
/// needs it. Nor may such a thread be the one that destroys the group, for it would wait for itself: a callback of a
/// torch future runs on a thread of Gloo, and may be the last to know the group.
inline std::shared_ptr<ProcessGroup> destroyed_without_gil(std::shared_ptr<ProcessGroup> group) {
  auto* address = group.get();
  return {address, [group = std::move(group)](ProcessGroup*) mutable {
            if (!Py_IsInitialized() || !PyGILState_Check()) {
              group.reset();
            } else if (!_Py_IsFinalizing() && on_an_engines_thread()) {
              destroy_on_main_thread(std::move(group));
            } else {
              const py::gil_scoped_release release;
              group.reset();
            }
          }};
}

}  // namespace unisono::python
