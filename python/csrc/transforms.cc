#include <torch/csrc/utils/pybind.h>
#include <unisono/parameter_averager.h>
#include <unisono/transforms.h>

#include "bindings.h"
#include "named.h"

namespace unisono::python {
namespace {

/// torch's `GradBucket` for Python hooks.
class HookBucket {
 public:
  explicit HookBucket(GradientBucket bucket) : bucket_(std::move(bucket)), buffer_(bucket_.buffer) {}
  int index() const { return bucket_.index; }
  bool is_last() const { return bucket_.is_last; }
  const at::Tensor& buffer() const { return buffer_; }
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> out;
    for (const NamedTensor& g : bucket_.gradients) out.push_back(g.tensor);
    return out;
  }
  const std::vector<at::Tensor>& parameters() const { return bucket_.parameters; }

 private:
  GradientBucket bucket_;
  at::Tensor buffer_;
};

/// A torch.futures.Future as a call in flight.
class FutureWork final : public WorkState {
 public:
  explicit FutureWork(py::object future) : future_(std::move(future)) {}
  ~FutureWork() override {
    py::gil_scoped_acquire gil;
    future_ = py::object();
    value_ = py::object();
  }
  bool poll() override {
    py::gil_scoped_acquire gil;
    return future_.attr("done")().cast<bool>();
  }
  void wait() override {
    py::gil_scoped_acquire gil;
    try {
      value_ = future_.attr("wait")();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  std::exception_ptr error() const override { return error_; }
  const ControlRecord& control() const override { return none_; }
  bool withheld() const override { return false; }

  /// A hook's result: a tensor, or a list of one.
  at::Tensor result() const {
    py::gil_scoped_acquire gil;
    const py::object value = py::isinstance<py::list>(value_) ? py::object(value_[py::int_(0)]) : value_;
    return value.cast<at::Tensor>();
  }

 private:
  py::object future_;
  py::object value_;
  std::exception_ptr error_;
  ControlRecord none_;
};

class PythonHook final : public GradientTransform {
 public:
  PythonHook(py::object state, py::object hook, std::string name, Yields yields)
      : state_(std::move(state)), hook_(std::move(hook)), name_(std::move(name)), yields_(yields) {}
  ~PythonHook() override {
    py::gil_scoped_acquire gil;
    state_ = py::object();
    hook_ = py::object();
  }
  std::string name() const override { return name_; }
  Yields yields() const override { return yields_; }
  bool keeps_replicas_equal() const override { return false; }  // nobody knows what it does

  TransformTask run(GradientBucket bucket, GradientChannel&) override {
    const at::Tensor buffer = bucket.buffer;
    std::shared_ptr<FutureWork> work = call(std::move(bucket));
    co_await Work(work);
    const at::Tensor result = work->result();
    if (result.numel() != buffer.numel()) {
      throw Error(ErrorCode::invalid_argument, "the hook's future holds " + std::to_string(result.numel()) +
                                                   " numbers for a bucket of " + std::to_string(buffer.numel()));
    }
    if (result.data_ptr() != buffer.data_ptr()) buffer.copy_(result.view_as(buffer));
  }

 private:
  std::shared_ptr<FutureWork> call(GradientBucket bucket) {
    py::gil_scoped_acquire gil;
    py::object future = hook_(state_, HookBucket(std::move(bucket)));
    if (!py::hasattr(future, "wait")) {
      throw Error(ErrorCode::invalid_argument,
                  "the hook returned " + py::repr(future).cast<std::string>() + " instead of a torch.futures.Future");
    }
    return std::make_shared<FutureWork>(std::move(future));
  }

  py::object state_;
  py::object hook_;
  std::string name_;
  Yields yields_;
};

}  // namespace

void bind_transforms(py::module_& module) {
  py::class_<ParameterAverager>(module, "ParameterAverager")
      .def(py::init(
          [](const Named& parameters, std::shared_ptr<ProcessGroup> group, std::int64_t period, std::int64_t warmup) {
            return ParameterAverager(named(parameters), std::move(group), period, warmup);
          }))
      .def(
          "follow", [](ParameterAverager& self, const Named& parameters) { self.follow(named(parameters)); },
          py::arg("parameters"))
      .def("step", &ParameterAverager::step, WithoutGil())
      .def("average", &ParameterAverager::average, WithoutGil());
  py::class_<HookBucket>(module, "GradBucket")
      .def("index", &HookBucket::index)
      .def("is_last", &HookBucket::is_last)
      .def("buffer", &HookBucket::buffer)
      .def("set_buffer", &HookBucket::set_buffer)
      .def("gradients", &HookBucket::gradients)
      .def("parameters", &HookBucket::parameters);
  py::class_<GradientTransform, std::shared_ptr<GradientTransform>>(module, "GradientTransform")
      .def_property_readonly("name", &GradientTransform::name)
      .def("state_dict",
           [](const GradientTransform& self) {
             py::dict out;
             for (const NamedTensor& t : self.state()) out[py::str(t.name)] = t.tensor;
             return out;
           })
      .def("load_state_dict",
           [](GradientTransform& self, const std::map<std::string, at::Tensor>& state) {
             std::vector<NamedTensor> tensors;
             for (const auto& [name, tensor] : state) tensors.push_back({name, tensor});
             self.load_state(tensors);
           })
      .def("__repr__", [](const GradientTransform& self) { return "<unisono.GradientTransform " + self.name() + ">"; });
  module.def("f16_transform", &f16_transform);
  module.def("bf16_transform", &bf16_transform);
  module.def("int8_transform", &int8_transform, py::arg("error_feedback") = true);
  module.def(
      "power_sgd_transform",
      [](int rank, std::int64_t start_step, bool error_feedback, bool warm_start, double min_compression,
         std::uint64_t seed) {
        return power_sgd_transform({rank, start_step, error_feedback, warm_start, min_compression, seed});
      },
      py::arg("rank"), py::arg("start_step"), py::arg("error_feedback"), py::arg("warm_start"),
      py::arg("min_compression"), py::arg("seed"));
  module.def("post_local_sgd_transform", &post_local_sgd_transform, py::arg("start_step"), py::arg("local"));
  module.def(
      "hook_transform",
      [](py::object state, py::object hook, std::string name, bool yields_mean) {
        return std::static_pointer_cast<GradientTransform>(std::make_shared<PythonHook>(
            std::move(state), std::move(hook), std::move(name),
            yields_mean ? GradientTransform::Yields::mean : GradientTransform::Yields::sum));
      },
      py::arg("state"), py::arg("hook"), py::arg("name"), py::arg("yields_mean"));
}

}  // namespace unisono::python
