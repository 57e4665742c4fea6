#pragma once

#include <torch/csrc/utils/pybind.h>
#include <unisono/error.h>

namespace unisono::python {

/// For every call that may wait for a peer, and for whatever autograd calls back.
using WithoutGil = py::call_guard<py::gil_scoped_release>;

/// Throws the Python exception of `error`: for errors that leave through autograd, which knows Python's but not ours.
void throw_in_python(const Error& error);

void bind_errors(py::module_& module);
void bind_group(py::module_& module);
void bind_data_parallel(py::module_& module);
void bind_transforms(py::module_& module);
void bind_sync_batch_norm(py::module_& module);
void bind_bench(py::module_& module);

}  // namespace unisono::python

/// torch.distributed on both sides: its groups behind our contract, ours behind its own.
void bind_c10d(pybind11::module_& module);
