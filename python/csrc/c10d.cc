#include <pybind11/chrono.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <unisono/c10d.h>
#include <unisono/init.h>
#include <unisono/torch_backend.h>

#include "bindings.h"
#include "without_gil.h"

void bind_c10d(pybind11::module_& module) {
  using unisono::python::WithoutGil;
  using unisono::python::destroyed_without_gil;
  // The classes of torch.distributed must be known before the signatures below name them.
  py::module_::import("torch.distributed");

  module.def("make_store", &unisono::make_store, py::arg("store"),
             "A torch.distributed store as a rendezvous store of unisono.");
  module.def(
      "from_torch",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        return destroyed_without_gil(unisono::make_c10d_group(group));
      },
      py::arg("group"), WithoutGil(), "A torch.distributed.ProcessGroup as a unisono.ProcessGroup.");
  module.def(
      "make_hierarchical_group",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::intrusive_ptr<c10d::ProcessGroup>& across, int hosts,
         int local_rank, int local_size, int carriers, const c10::intrusive_ptr<c10d::Store>& store) {
        const unisono::HostPlace place{hosts, local_rank, local_size, carriers};
        return destroyed_without_gil(unisono::make_hierarchical_group(group, across, place, unisono::make_store(store)));
      },
      py::arg("group"), py::arg("across").none(true), py::arg("hosts"), py::arg("local_rank"), py::arg("local_size"),
      py::arg("carriers"), py::arg("store"), WithoutGil());
  // The arguments are those that torch.distributed.Backend.register_backend's creator receives, in its order.
  module.def(
      "create_torch_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::duration<double> timeout) {
        auto group = unisono::make_group_on_store(store, rank, size, timeout);
        return unisono::make_torch_backend(destroyed_without_gil(std::move(group)));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), WithoutGil());
  module.def("make_torch_backend", &unisono::make_torch_backend, py::arg("group"), WithoutGil(),
             "A unisono.ProcessGroup as a torch.distributed backend.");
}
