#include <unisono/error.h>

#include "bindings.h"

namespace unisono::python {

namespace {

/// The classes are Python's (unisono/errors.py): one per code, each of them a `unisono.Error`.
void raise_in_python(const Error& error) {
  const auto raise = py::module_::import("unisono.errors").attr("make");
  const auto exception = raise(std::string(to_string(error.code())), error.what());
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
}

}  // namespace

void throw_in_python(const Error& error) {
  py::gil_scoped_acquire gil;
  raise_in_python(error);
  throw py::error_already_set();
}

void bind_errors(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const Error& error) {
      raise_in_python(error);
    }
  });
}

}  // namespace unisono::python
