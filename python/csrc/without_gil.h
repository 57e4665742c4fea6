#pragma once

#include <memory>
#include <utility>

#include <unisono/process_group.h>

#include "bindings.h"

namespace unisono::python {

/// The same group, destroyed without Python's lock whoever lets go of it last. A group's destructor waits for its thread, and
/// that thread may be waiting for the lock: to drop the last reference to a tensor that Python has seen, one needs it.
inline std::shared_ptr<ProcessGroup> destroyed_without_gil(std::shared_ptr<ProcessGroup> group) {
  auto* address = group.get();
  return {address, [group = std::move(group)](ProcessGroup*) mutable {
            if (Py_IsInitialized() && PyGILState_Check()) {
              const py::gil_scoped_release release;
              group.reset();
            } else {
              group.reset();
            }
          }};
}

}  // namespace unisono::python
