#include "reducer/gradient_slot.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstring>

#include "reducer/densify.h"

namespace unisono {
namespace {

std::vector<std::int64_t> layout_of(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  std::vector<std::int64_t> strides(static_cast<std::size_t>(parameter.dim()));
  std::int64_t step = 1;
  for (std::int64_t d = parameter.dim() - 1; d >= 0; --d) {
    strides[static_cast<std::size_t>(d)] = step;
    step *= std::max<std::int64_t>(parameter.size(d), 1);
  }
  return strides;
}

}  // namespace

GradientSlot::GradientSlot(std::string name, at::Tensor parameter, bool as_view, bool sparse,
                           std::optional<at::ScalarType> travels_as)
    : name_(std::move(name)), parameter_(std::move(parameter)), as_view_(as_view), sparse_(sparse) {
  const at::ScalarType own = parameter_.scalar_type();
  type_ = travels_as && at::isFloatingType(own) ? *travels_as : own;
  as_view_ = as_view_ && type_ == own;
}

GradientSpec GradientSlot::spec() const {
  return {static_cast<std::size_t>(parameter_.numel()) * c10::elementSize(type_),
          wire_type(type_, "parameter '" + name_ + "'").dtype, place_of(parameter_)};
}

void GradientSlot::place(const at::Storage& storage, std::size_t byte_offset) {
  at::NoGradGuard no_grad;
  const bool carries = as_view_ && view_.defined() && grad_is_view();
  at::Tensor place = at::empty({0}, parameter_.options().dtype(type_).requires_grad(false));
  place.set_(storage, static_cast<std::int64_t>(byte_offset / c10::elementSize(type_)), parameter_.sizes(),
             layout_of(parameter_));
  if (carries) {
    place.copy_(view_);
    parameter_.mutable_grad() = place;
  }
  view_ = std::move(place);
  home_ = view_.detach();
  plain_ = view_.is_cpu() && view_.is_contiguous();
}

at::Tensor& GradientSlot::dense_grad() {
  if (view_.defined() && view_.const_data_ptr() != home_.const_data_ptr()) view_ = home_.detach();
  return parameter_.mutable_grad();
}

bool GradientSlot::grad_is_view() const {
  const at::Tensor& grad = parameter_.grad();
  if (grad.unsafeGetTensorImpl() == view_.unsafeGetTensorImpl()) return true;
  return grad.defined() && grad.layout() == at::kStrided && grad.scalar_type() == view_.scalar_type() &&
         grad.numel() > 0 && grad.data_ptr() == view_.data_ptr() && grad.strides() == view_.strides();
}

void GradientSlot::write_view(const at::Tensor& gradient) {
  // A lazy conjugate or negative has other bits in memory than it stands for.
  if (plain_ && gradient.is_contiguous() && gradient.is_cpu() && gradient.scalar_type() == view_.scalar_type() &&
      gradient.numel() == view_.numel() && !gradient.is_conj() && !gradient.is_neg()) {
    if (const std::size_t bytes = view_.nbytes()) std::memcpy(view_.data_ptr(), gradient.const_data_ptr(), bytes);
    return;
  }
  at::NoGradGuard no_grad;
  view_.copy_(densified(gradient));
}

at::Tensor GradientSlot::take(const at::Tensor& gradient) {
  if (sparse_) return gradient;
  at::Tensor& grad = dense_grad();
  if (!as_view_) {
    if (gradient.layout() == at::kStrided) return gradient;
    return densified(gradient);
  }
  if (!grad.defined()) {
    write_view(gradient);
    grad = view_;
    return {};
  }
  if (!grad_is_view()) {
    write_view(grad);
    grad = view_;
  }
  return gradient;
}

at::Tensor GradientSlot::take_setting_aside(const at::Tensor& gradient) {
  at::Tensor& grad = parameter_.mutable_grad();
  if (grad.defined()) {
    at::NoGradGuard no_grad;
    aside_ = sparse_ ? grad.detach() : grad.detach().clone();
    grad.reset();
  }
  return take(gradient);
}

void GradientSlot::taken() {
  if (sparse_) return;
  at::Tensor& grad = dense_grad();
  if (!grad.defined() || grad_is_view()) return;
  write_view(grad);
  if (as_view_) grad = view_;
}

void GradientSlot::begin_late() {
  hidden_ = parameter_.grad();
  parameter_.mutable_grad().reset();
  late_ = true;
}

void GradientSlot::end_late() {
  at::NoGradGuard no_grad;
  const at::Tensor fresh = parameter_.grad();
  parameter_.mutable_grad() = hidden_;
  hidden_.reset();
  late_ = false;
  if (!fresh.defined()) return;
  at::Tensor dense = densified(fresh);
  if (delta_.defined()) {
    delta_ += dense;
  } else {
    delta_ = dense;
  }
}

at::Tensor GradientSlot::flat_view() const {
  at::Tensor real = view_.is_complex() ? at::view_as_real(view_) : view_;
  return at::empty({0}, real.options()).set_(real.storage(), real.storage_offset(), {real.numel()}, {1});
}

void GradientSlot::write_delta(const at::Tensor& flat) const {
  at::NoGradGuard no_grad;
  at::Tensor typed = view_.is_complex() ? at::view_as_complex(flat.view({-1, 2})) : flat;
  typed.as_strided(view_.sizes(), view_.strides(), typed.storage_offset()).copy_(delta_);
}

void GradientSlot::add_delta(const at::Tensor& averaged) {
  at::NoGradGuard no_grad;
  flat_view().add_(averaged);
}

void GradientSlot::fill_silent(bool weighted) {
  at::NoGradGuard no_grad;
  at::Tensor& grad = dense_grad();
  if (!grad.defined()) {
    view_.zero_();
    return;
  }
  kept_ = grad.detach().clone();
  if (weighted) {
    aside_ = kept_;
    view_.zero_();
    if (as_view_) grad = view_;
    return;
  }
  fill_accumulated();
}

void GradientSlot::fill_accumulated() {
  at::Tensor& grad = dense_grad();
  if (!grad.defined()) {
    at::NoGradGuard no_grad;
    view_.zero_();
    return;
  }
  if (!grad_is_view()) {
    write_view(grad);
    if (as_view_) grad = view_;
  }
}

at::Tensor GradientSlot::give_sparse(bool fresh, bool weighted) {
  at::Tensor& grad = parameter_.mutable_grad();
  if (!grad.defined()) return {};
  if (fresh || !weighted) return grad.detach();
  aside_ = grad.detach();
  return {};
}

void GradientSlot::accept_sparse(const at::Tensor& averaged) {
  parameter_.mutable_grad() = aside_.defined() ? averaged + aside_ : averaged;
  aside_.reset();
}

void GradientSlot::settle(bool produced) {
  if (sparse_) return aside_.reset();
  at::NoGradGuard no_grad;
  at::Tensor& grad = dense_grad();
  if (!produced) {
    if (kept_.defined()) {
      grad.copy_(kept_);
    }
  } else {
    if (aside_.defined()) view_.add_(aside_);
    if (as_view_) {
      if (!grad_is_view()) grad = view_;
    } else if (grad.defined() && grad.layout() == at::kStrided) {
      grad.detach().copy_(view_);
    } else {
      grad = view_.to(parameter_.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  }
  aside_.reset();
  kept_.reset();
}

void GradientSlot::reset() {
  if (late_) {
    parameter_.mutable_grad() = hidden_;
    hidden_.reset();
    late_ = false;
  }
  delta_.reset();
  aside_.reset();
  kept_.reset();
}

}  // namespace unisono
