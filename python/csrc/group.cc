#include <pybind11/chrono.h>
#include <unisono/companion.h>
#include <unisono/init.h>
#include <unisono/make_group.h>
#include <unisono/process_group.h>
#include <unisono/regroup.h>
#include <unisono/round_robin.h>

#include <variant>

#include "bindings.h"
#include "reducer/torch_types.h"
#include "without_gil.h"

namespace unisono::python {

namespace {

using Seconds = std::chrono::duration<double>;

std::chrono::nanoseconds nanoseconds(Seconds seconds, const char* name) {
  constexpr double kMost = 1e9;
  if (!(seconds.count() > 0 && seconds.count() < kMost))
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " is " + std::to_string(seconds.count()) + " s; it must be above 0 and below 1e9");
  return std::chrono::duration_cast<std::chrono::nanoseconds>(seconds);
}

/// The tensor's memory as it is; the buffer keeps the tensor alive.
Buffer buffer_of(const at::Tensor& tensor, const char* what) {
  if (!tensor.is_contiguous())
    throw Error(ErrorCode::invalid_argument, std::string(what) + " must be contiguous; call .contiguous() first");
  if (tensor.is_conj() || tensor.is_neg())
    throw Error(ErrorCode::invalid_argument,
                std::string(what) + " is a view that conjugates or negates; call .resolve_conj().resolve_neg() first");
  const WireType wire = wire_type(tensor.scalar_type(), what);
  return {tensor.data_ptr(), static_cast<std::size_t>(tensor.numel() * wire.parts), wire.dtype, place_of(tensor),
          std::make_shared<at::Tensor>(tensor)};
}

ReduceOp op_of(const std::string& name) {
  for (auto op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::product, ReduceOp::bit_and,
                  ReduceOp::bit_or, ReduceOp::bit_xor})
    if (to_string(op) == name) return op;
  throw Error(ErrorCode::invalid_argument,
              "unknown reduce op '" + name + "'; it may be sum, avg, min, max, product, bit_and, bit_or or bit_xor");
}

/// For questions that are answered without meeting anybody.
class NoStore final : public Store {
 public:
  void set(const std::string&, const std::string&) override {}
  std::optional<std::string> get(const std::string&, std::chrono::nanoseconds) override { return std::nullopt; }
  std::int64_t add(const std::string&, std::int64_t amount) override { return amount; }
};

void bind_work(py::module_& module) {
  py::class_<Work>(module, "Work")
      .def("wait", &Work::wait, WithoutGil())
      .def("poll", &Work::poll, WithoutGil())
      .def("arrivals", &Work::arrivals);
}

void bind_calls(py::class_<ProcessGroup, std::shared_ptr<ProcessGroup>>& group) {
  group
      .def(
          "all_reduce",
          [](ProcessGroup& self, const at::Tensor& tensor, const std::string& op, bool may_round) {
            AllReduceOptions options;
            options.op = op_of(op);
            options.may_round = may_round;
            return self.all_reduce(buffer_of(tensor, "all_reduce: the tensor"), options);
          },
          py::arg("tensor"), py::arg("op") = "sum", py::arg("may_round") = false, WithoutGil())
      .def(
          "broadcast",
          [](ProcessGroup& self, const at::Tensor& tensor, int root) {
            return self.broadcast(buffer_of(tensor, "broadcast: the tensor"), root);
          },
          py::arg("tensor"), py::arg("root") = 0, WithoutGil())
      .def(
          "all_gather",
          [](ProcessGroup& self, const at::Tensor& out, const at::Tensor& in) {
            return self.all_gather(buffer_of(out, "all_gather: the output"), buffer_of(in, "all_gather: the input"));
          },
          py::arg("out"), py::arg("input"), WithoutGil())
      .def(
          "barrier", [](ProcessGroup& self) { return self.barrier(); }, WithoutGil())
      .def(
          "abort", [](ProcessGroup& self, const std::string& cause) { self.abort(Error(ErrorCode::peer_lost, cause)); },
          py::arg("cause"), WithoutGil());
}

void bind_regroup(py::module_& module, py::class_<ProcessGroup, std::shared_ptr<ProcessGroup>>& group) {
  group
      .def(
          "without",
          [](const std::shared_ptr<ProcessGroup>& self, std::vector<int> ranks,
             std::variant<Seconds, double> start_timeout) {
            const auto limit = std::visit([](auto value) { return Seconds(value); }, start_timeout);
            return destroyed_without_gil(without(self, std::move(ranks), nanoseconds(limit, "start_timeout")));
          },
          py::arg("ranks"), py::arg("start_timeout") = 300.0, WithoutGil())
      .def("lost_ranks", &lost_ranks, WithoutGil())
      .def_property_readonly("store", [](const ProcessGroup& self) { return store_of(self); });
  module.def(
      "make_round_robin_group",
      [](std::vector<std::shared_ptr<ProcessGroup>> groups) {
        return destroyed_without_gil(make_round_robin_group(std::move(groups)));
      },
      py::arg("groups"), WithoutGil());
}

}  // namespace

void bind_group(py::module_& module) {
  bind_work(module);
  py::class_<Store, std::shared_ptr<Store>>(module, "Store");
  py::class_<ProcessGroup, std::shared_ptr<ProcessGroup>> group(module, "ProcessGroup");
  group.def("rank", &ProcessGroup::rank)
      .def("size", &ProcessGroup::size)
      .def_property_readonly("name", &ProcessGroup::name)
      .def_property_readonly("timeout", [](const ProcessGroup& self) { return Seconds(self.timeout()).count(); })
      .def("__repr__", [](const ProcessGroup& self) {
        return "<unisono.ProcessGroup " + self.name() + ", rank " + std::to_string(self.rank()) + " of " +
               std::to_string(self.size()) + ">";
      });
  bind_calls(group);
  bind_regroup(module, group);

  module.def(
      "init",
      [](const std::string& transport, int rank, int size, Seconds timeout, Seconds start_timeout,
         const std::shared_ptr<Store>& store, const std::string& prefix) {
        return destroyed_without_gil(init({.transport = transport,
                                           .rank = rank,
                                           .size = size,
                                           .store = store,
                                           .timeout = nanoseconds(timeout, "timeout"),
                                           .start_timeout = nanoseconds(start_timeout, "start_timeout"),
                                           .prefix = prefix}));
      },
      py::arg("transport") = "auto", py::arg("rank") = -1, py::arg("size") = -1, py::arg("timeout") = Seconds(1800),
      py::arg("start_timeout") = Seconds(300), py::arg("store") = py::none(), py::arg("prefix") = "unisono",
      WithoutGil());
  module.def("set_companion", &set_companion, py::arg("group"), py::arg("companion"));
  module.def("describe_environment", &describe_environment);
  module.def(
      "viable_transports",
      [](int size) {
        std::vector<std::tuple<std::string, bool, std::string>> out;
        for (auto& v : viable_transports({.rank = 0, .size = size, .store = std::make_shared<NoStore>()}))
          out.emplace_back(v.transport, v.viable, v.reason);
        return out;
      },
      py::arg("size"));
}

}  // namespace unisono::python
