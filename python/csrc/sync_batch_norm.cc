#include <unisono/sync_batch_norm.h>

#include "bindings.h"

namespace unisono::python {

void bind_sync_batch_norm(py::module_& module) {
  using Given = std::optional<at::Tensor>;
  module.def(
      "sync_batch_norm",
      [](const at::Tensor& input, const Given& weight, const Given& bias, const Given& running_mean,
         const Given& running_var, const std::shared_ptr<ProcessGroup>& group, double momentum, double eps) {
        const at::Tensor none;
        return sync_batch_norm(input, weight.value_or(none), bias.value_or(none), running_mean.value_or(none),
                               running_var.value_or(none), group,
                               {.eps = eps, .momentum = momentum, .rethrow = &throw_in_python});
      },
      py::arg("input"), py::arg("weight"), py::arg("bias"), py::arg("running_mean"), py::arg("running_var"),
      py::arg("group"), py::arg("momentum"), py::arg("eps"), WithoutGil());
}

}  // namespace unisono::python
