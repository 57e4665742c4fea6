#include "bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "unisono's C++ library; use it through the package `unisono`";
  module.attr("__version__") = UNISONO_VERSION;
  unisono::python::bind_errors(module);
  unisono::python::bind_group(module);
  unisono::python::bind_transforms(module);
  unisono::python::bind_data_parallel(module);
  unisono::python::bind_sync_batch_norm(module);
  unisono::python::bind_bench(module);
  bind_c10d(module);
}
