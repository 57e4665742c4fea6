#include <pybind11/functional.h>
#include <unisono/distributed_data_parallel.h>

#include "bindings.h"
#include "named.h"
#include "reducer/torch_types.h"

namespace unisono::python {

namespace {

// The hook is called, and let go of, with Python's lock; the wrapper runs without it.
void set_buffer_hook(DataParallel& self, const py::object& hook) {
  if (hook.is_none()) return self.set_buffer_hook(nullptr);
  std::shared_ptr<py::object> kept(new py::object(hook), [](py::object* object) {
    py::gil_scoped_acquire gil;
    delete object;
  });
  self.set_buffer_hook([kept](const std::vector<NamedTensor>& buffers, ProcessGroup&) {
    py::gil_scoped_acquire gil;
    py::dict by_name;
    for (const NamedTensor& b : buffers) by_name[py::str(b.name)] = b.tensor;
    (*kept)(by_name);
  });
}

void bind_options(py::module_& module) {
  using Options = DistributedDataParallelOptions;
  py::enum_<BufferPolicy>(module, "BufferPolicy").value("rank0", BufferPolicy::rank0).value("mean", BufferPolicy::mean);
  py::class_<Options>(module, "DistributedDataParallelOptions")
      .def(py::init<>())
      .def_readwrite("bucket_cap_mb", &Options::bucket_cap_mb)
      .def_readwrite("broadcast_buffers", &Options::broadcast_buffers)
      .def_readwrite("init_sync", &Options::init_sync)
      .def_readwrite("buffer_policy", &Options::buffer_policy)
      .def_readwrite("find_unused_parameters", &Options::find_unused_parameters)
      .def_readwrite("gradient_as_bucket_view", &Options::gradient_as_bucket_view)
      .def_readwrite("static_graph", &Options::static_graph)
      .def_readwrite("overlap", &Options::overlap)
      .def_readwrite("naive", &Options::naive)
      .def_readwrite("strict", &Options::strict)
      .def_readwrite("uneven_accumulation", &Options::uneven_accumulation)
      .def_readwrite("check_finite", &Options::check_finite)
      .def_readwrite("check_replicas", &Options::check_replicas)
      .def_readwrite("bucket_cap_mb_list", &Options::bucket_cap_mb_list)
      .def_readwrite("delayed_parameters", &Options::delayed_parameters)
      .def_readwrite("sparse_parameters", &Options::sparse_parameters)
      .def(
          "set_reduce_dtype",
          [](Options& self, at::ScalarType type) { self.reduce_dtype = wire_type(type, "reduce_dtype").dtype; },
          py::arg("dtype"))
      .def_readwrite("parameters_and_buffers_to_ignore", &Options::parameters_and_buffers_to_ignore);
}

void bind_stats(py::module_& module) {
  py::class_<BucketStats>(module, "BucketStats")
      .def_readonly("bucket", &BucketStats::bucket)
      .def_readonly("bytes", &BucketStats::bytes)
      .def_readonly("first_ready_ns", &BucketStats::first_ready_ns)
      .def_readonly("ready_ns", &BucketStats::ready_ns)
      .def_readonly("launched_ns", &BucketStats::launched_ns)
      .def_readonly("arrivals_ns", &BucketStats::arrivals_ns)
      .def_readonly("done_ns", &BucketStats::done_ns);
  py::class_<Straggler>(module, "Straggler")
      .def_readonly("rank", &Straggler::rank)
      .def_readonly("bucket", &Straggler::bucket)
      .def_readonly("late_s", &Straggler::late_s);
  py::class_<StepStats>(module, "StepStats")
      .def_readonly("step", &StepStats::step)
      .def_readonly("backward_s", &StepStats::backward_s)
      .def_readonly("exposed_s", &StepStats::exposed_s)
      .def_readonly("waiting_s", &StepStats::waiting_s)
      .def_readonly("hidden_s", &StepStats::hidden_s)
      .def_readonly("buckets", &StepStats::buckets)
      .def_property_readonly("straggler", &StepStats::straggler)
      .def("to_json", [](const StepStats& self) { return to_json(self); })
      .def_readonly("bytes", &StepStats::bytes)
      .def_readonly("messages", &StepStats::messages)
      .def_readonly("rebuilds", &StepStats::rebuilds)
      .def("__repr__", [](const StepStats& s) {
        return "<StepStats step=" + std::to_string(s.step) + " backward_s=" + std::to_string(s.backward_s) +
               " exposed_s=" + std::to_string(s.exposed_s) + " bytes=" + std::to_string(s.bytes) +
               " messages=" + std::to_string(s.messages) + ">";
      });
  py::class_<TraceEvent>(module, "TraceEvent")
      .def_readonly("name", &TraceEvent::name)
      .def_readonly("category", &TraceEvent::category)
      .def_readonly("begin_ns", &TraceEvent::begin_ns)
      .def_readonly("end_ns", &TraceEvent::end_ns)
      .def_readonly("step", &TraceEvent::step)
      .def_readonly("bucket", &TraceEvent::bucket);
  module.def("write_chrome_trace", &write_chrome_trace, py::arg("path"), py::arg("rank"), py::arg("events"));
}

}  // namespace

void bind_data_parallel(py::module_& module) {
  bind_options(module);
  bind_stats(module);
  py::class_<DataParallel>(module, "DataParallel")
      .def(py::init([](const Named& parameters, const Named& buffers, std::shared_ptr<ProcessGroup> group,
                       const DistributedDataParallelOptions& options) {
             auto with_rethrow = options;
             with_rethrow.rethrow = &throw_in_python;
             return std::make_unique<DataParallel>(named(parameters), named(buffers), std::move(group), with_rethrow);
           }),
           py::arg("parameters"), py::arg("buffers"), py::arg("group"), py::arg("options"), WithoutGil())
      .def(
          "before_forward", [](DataParallel& self, const Named& buffers) { self.before_forward(named(buffers)); },
          py::arg("buffers"), WithoutGil())
      .def("wants_buffers", &DataParallel::wants_buffers)
      .def(
          "sync_state", [](DataParallel& self, const Named& buffers) { self.sync_state(named(buffers)); },
          py::arg("buffers"), WithoutGil())
      .def(
          "follow_buffers", [](DataParallel& self, const Named& buffers) { self.follow_buffers(named(buffers)); },
          py::arg("buffers"))
      .def("set_buffer_hook", &set_buffer_hook, py::arg("hook"))
      .def("after_forward", &DataParallel::after_forward, py::arg("outputs"), WithoutGil())
      .def("wants_outputs", &DataParallel::wants_outputs)
      .def("has_unsynchronised_gradients", &DataParallel::has_unsynchronised_gradients)
      .def("set_sync", &DataParallel::set_sync, py::arg("on"))
      .def("sync", &DataParallel::sync)
      .def("weight", &DataParallel::weight, py::arg("mean_loss"), py::arg("n"), WithoutGil())
      .def("sync_grads", &DataParallel::sync_grads, WithoutGil())
      .def(
          "begin_join",
          [](DataParallel& self, bool divide_by_initial_world_size, bool throw_on_early_termination) {
            self.begin_join({divide_by_initial_world_size, throw_on_early_termination});
          },
          py::arg("divide_by_initial_world_size"), py::arg("throw_on_early_termination"))
      .def("finish_join", &DataParallel::finish_join, WithoutGil())
      .def("cancel_join", &DataParallel::cancel_join)
      .def("parameters_changed", &DataParallel::parameters_changed)
      .def(
          "follow",
          [](DataParallel& self, const Named& parameters, const Named& buffers) {
            self.follow(named(parameters), named(buffers));
          },
          py::arg("parameters"), py::arg("buffers"), WithoutGil())
      .def(
          "set_group",
          [](DataParallel& self, std::shared_ptr<ProcessGroup> group, const Named& parameters, const Named& buffers) {
            self.set_group(std::move(group), named(parameters), named(buffers));
          },
          py::arg("group"), py::arg("parameters"), py::arg("buffers"), WithoutGil())
      .def("set_transform", &DataParallel::set_transform, py::arg("transform").none(true), WithoutGil())
      .def("transform", &DataParallel::transform)
      .def(
          "set_step_in_backward",
          [](DataParallel& self, std::function<void(const std::vector<at::Tensor>&)> update,
             std::optional<double> max_norm, bool overlap_forward, std::function<void(bool)> steps_left) {
            if (!update) return self.set_step_in_backward(nullptr);
            self.set_step_in_backward(
                [update = std::move(update)](const std::vector<NamedTensor>& parameters) {
                  std::vector<at::Tensor> tensors;
                  for (const NamedTensor& p : parameters) tensors.push_back(p.tensor);
                  update(tensors);
                },
                {max_norm, overlap_forward, std::move(steps_left)});
          },
          py::arg("update").none(true), py::arg("max_norm") = py::none(), py::arg("overlap_forward") = false,
          py::arg("steps_left").none(true) = py::none())
      .def("finish_step", &DataParallel::finish_step, WithoutGil())
      .def("check_step", &DataParallel::check_step, WithoutGil())
      .def(
          "digest",
          [](const DataParallel& self, const Named& parameters, const Named& buffers) {
            return self.digest(named(parameters), named(buffers));
          },
          py::arg("parameters"), py::arg("buffers"), WithoutGil())
      .def(
          "replicas_identical",
          [](DataParallel& self, const Named& parameters, const Named& buffers) {
            return self.replicas_identical(named(parameters), named(buffers));
          },
          py::arg("parameters"), py::arg("buffers"), WithoutGil())
      .def("last_step", &DataParallel::last_step, py::return_value_policy::copy)
      .def("set_tracing", &DataParallel::set_tracing, py::arg("on"))
      .def("take_trace", &DataParallel::take_trace)
      .def("bucket_sizes", &DataParallel::bucket_sizes)
      .def("group", &DataParallel::group);
}

}  // namespace unisono::python
