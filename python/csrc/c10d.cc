#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <unisono/c10d.h>
#include <unisono/hosts.h>
#include <unisono/init.h>
#include <unisono/torch_backend.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "without_gil.h"

void bind_c10d(pybind11::module_& module) {
  using unisono::python::destroyed_without_gil;
  using unisono::python::WithoutGil;
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
      "make_ordered_group",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        return destroyed_without_gil(unisono::make_ordered_group(group));
      },
      py::arg("group"), WithoutGil());
  module.def(
      "make_hierarchical_group",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& all, const c10::intrusive_ptr<c10d::ProcessGroup>& across,
         const c10::intrusive_ptr<c10d::ProcessGroup>& leaders, std::vector<std::vector<int>> hosts,
         const c10::intrusive_ptr<c10d::Store>& store, bool ordered) {
        return destroyed_without_gil(unisono::make_hierarchical_group({all, across, leaders}, std::move(hosts),
                                                                      unisono::make_store(store), ordered));
      },
      py::arg("all"), py::arg("across").none(true), py::arg("leaders").none(true), py::arg("hosts"), py::arg("store"),
      py::arg("ordered") = false, WithoutGil());
  module.def(
      "find_hosts",
      [](const unisono::ExchangeTexts& exchange) {
        py::list out;
        for (const auto& ranks : unisono::find_hosts(exchange)) out.append(py::tuple(py::cast(ranks)));
        return out;
      },
      py::arg("exchange"));
  module.def("follows_tree", &unisono::follows_tree, py::arg("hosts"));
  module.def(
      "meet_over_hosts",
      [](const std::string& transport, int rank, int size, std::chrono::duration<double> start_timeout,
         const std::shared_ptr<unisono::Store>& store, const std::string& prefix) {
        const auto meeting =
            unisono::meet_over_hosts({.transport = transport,
                                      .rank = rank,
                                      .size = size,
                                      .store = store,
                                      .start_timeout = std::chrono::ceil<std::chrono::nanoseconds>(start_timeout),
                                      .prefix = prefix});
        return meeting ? std::make_tuple(meeting->store, meeting->rank, meeting->size)
                       : std::make_tuple(c10::intrusive_ptr<c10d::Store>(), 0, 1);
      },
      py::arg("transport"), py::arg("rank"), py::arg("size"), py::arg("start_timeout"), py::arg("store").none(true),
      py::arg("prefix"), WithoutGil());
  module.def(
      "make_group_on_store",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::duration<double> timeout) {
        return destroyed_without_gil(unisono::make_group_on_store(store, rank, size, timeout));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), WithoutGil());
  module.def("make_torch_backend", &unisono::make_torch_backend, py::arg("group"), py::arg("beside") = nullptr,
             WithoutGil(), "A unisono.ProcessGroup as a torch.distributed backend.");
}
