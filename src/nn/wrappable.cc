#include "nn/wrappable.h"

#include <algorithm>
#include <set>

#include "reducer/autograd_hooks.h"
#include "reducer/torch_types.h"

namespace unisono {

std::vector<NamedTensor> synchronised(const std::vector<NamedTensor>& tensors,
                                      const std::vector<std::string>& ignored) {
  const std::set<std::string> names(ignored.begin(), ignored.end());
  std::set<const void*> seen;
  std::vector<NamedTensor> out;
  for (const NamedTensor& t : tensors) {
    if (names.contains(t.name) || !t.tensor.defined()) continue;
    if (seen.insert(t.tensor.unsafeGetTensorImpl()).second) out.push_back(t);
  }
  return out;
}

void require_reducible(const std::vector<NamedTensor>& parameters, bool frozen) {
  bool any = frozen;
  for (const NamedTensor& p : parameters) {
    if (!p.tensor.requires_grad()) continue;
    any = true;
    if (p.tensor.layout() != at::kStrided || p.tensor.is_meta()) {
      throw Error(ErrorCode::invalid_argument,
                  "parameter '" + p.name + "' is " +
                      (p.tensor.is_meta() ? "on the meta device" : "not a strided tensor") +
                      "; give it real, dense memory before wrapping the module");
    }
    if (!p.tensor.is_leaf()) {
      throw Error(ErrorCode::invalid_argument, "parameter '" + p.name + "' is no leaf of the autograd graph");
    }
    wire_type(p.tensor.scalar_type(), "parameter '" + p.name + "'");
  }
  if (!any) {
    throw Error(
        ErrorCode::invalid_argument,
        "no parameter of the module requires grad, so there is nothing to synchronise; use the module as it is");
  }
}

void require_unwrapped(const std::vector<NamedTensor>& parameters) {
  for (const NamedTensor& p : parameters) {
    if (!p.tensor.requires_grad() || !is_hooked(p.tensor)) continue;
    throw Error(ErrorCode::invalid_argument,
                "parameter '" + p.name +
                    "' belongs to another DistributedDataParallel already: the module, or one inside or "
                    "around it, has been wrapped before. Its gradients would be averaged twice; wrap the outermost "
                    "module once, or destroy the other wrapper first.");
  }
}

ParameterMark::ParameterMark(const at::Tensor& parameter)
    : impl(parameter.unsafeGetTensorImpl()), options(parameter.options()), requires_grad(parameter.requires_grad()) {}

bool ParameterMark::still(const at::Tensor& parameter) const {
  return parameter.unsafeGetTensorImpl() == impl && parameter.requires_grad() == requires_grad &&
         parameter.scalar_type() == options.dtype() && parameter.device() == options.device();
}

}  // namespace unisono
