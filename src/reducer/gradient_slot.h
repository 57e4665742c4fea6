#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "reducer/bucket_plan.h"
#include "reducer/torch_types.h"

namespace unisono {

/// One parameter's gradient: where it lives while it is a `.grad`, and where it lies in a bucket.
///
/// With views (the default) `.grad` *is* the place in the bucket. Without, gradients are copied in when they are ready
/// and copied out when they are averaged. Every function here is local: no messages.
class GradientSlot {
 public:
  /// `sparse`: gradients are expected to be sparse and lie in no bucket. Elsewhere a sparse gradient is made dense.
  /// `travels_as`: the dtype in which the gradient lies in its bucket; `.grad` is no view then, unless it is the
  /// parameter's own.
  GradientSlot(std::string name, at::Tensor parameter, bool as_view, bool sparse = false,
               std::optional<at::ScalarType> travels_as = std::nullopt);

  const std::string& name() const { return name_; }
  const at::Tensor& parameter() const { return parameter_; }
  GradientSpec spec() const;

  /// Moves the slot to another place; what `.grad` holds, if it lies in the old place, goes along.
  void place(const at::Storage& storage, std::size_t byte_offset);
  /// Forgets the place, so that its memory can be given back. Only while `.grad` is undefined.
  void unplace() {
    view_.reset();
    home_.reset();
  }
  bool as_view() const { return as_view_; }
  bool is_sparse() const { return sparse_; }
  /// Changes with every write to `.grad`, whoever does it; 0: there is none.
  std::uint32_t version() const { return has_gradient() ? parameter_.grad()._version() + 1 : 0; }
  bool has_gradient() const { return parameter_.grad().defined(); }

  /// Before autograd accumulates, the place free to be written: returns what autograd shall accumulate. With `.grad`
  /// undefined the gradient is written to its place at once and nothing is left to accumulate.
  at::Tensor take(const at::Tensor& gradient);
  /// Like `take`, but what `.grad` holds is first set aside, to be added back by `settle` (a weighted window opens).
  at::Tensor take_setting_aside(const at::Tensor& gradient);
  /// After autograd accumulated: makes sure that the place holds the gradient.
  void taken();

  /// The bucket has been launched and another gradient arrives: take `.grad` away so that autograd makes a new tensor
  /// ...
  void begin_late();
  /// ... which is kept as this slot's delta.
  void end_late();
  bool is_late() const { return late_; }
  bool has_delta() const { return delta_.defined(); }
  /// Writes the delta into `flat`, a flat tensor of real numbers, in the layout of the place.
  void write_delta(const at::Tensor& flat) const;
  /// Adds the averaged deltas (flat, in the layout of the place) to the place.
  void add_delta(const at::Tensor& averaged);

  /// The bucket is about to leave and no gradient came in this window. An undefined `.grad` gives zeros; a defined one
  /// gives what it holds (`weighted`: zeros, and what it holds is set aside); a copy is kept in case no rank has any.
  void fill_silent(bool weighted);
  /// The bucket is about to leave and the gradient was accumulated in earlier backwards only.
  void fill_accumulated();

  /// The bucket is averaged. `produced`: by some rank in this window; else everything is put back bit for bit.
  void settle(bool produced);
  /// A sparse gradient lies in no bucket: what this rank gives to the average, undefined for nothing. `fresh`: a
  /// gradient came in this window.
  at::Tensor give_sparse(bool fresh, bool weighted);
  void accept_sparse(const at::Tensor& averaged);

  /// After a failure: forget what was set aside, hidden or late.
  void reset();
  /// ... and `.grad` with it.
  void drop() {
    reset();
    parameter_.mutable_grad().reset();
  }

  /// The place as a flat tensor of real numbers in memory order.
  at::Tensor flat_view() const;
  /// The place in the parameter's shape.
  const at::Tensor& place_view() const { return view_; }

 private:
  bool grad_is_view() const;
  void write_view(const at::Tensor& gradient);
  // `.grad`, to be compared with the place. Both are one tensor, and who assigns `.grad.data` moves both: then the
  // place gets a tensor of its own again.
  at::Tensor& dense_grad();

  std::string name_;
  at::Tensor parameter_;
  bool as_view_;
  bool sparse_;
  at::ScalarType type_;  // in the bucket
  bool plain_ = false;   // place and parameter are contiguous CPU memory: memcpy will do
  bool late_ = false;
  at::Tensor view_;    // the place in the bucket, as it is given to `.grad`
  at::Tensor home_;    // the same, given to nobody
  at::Tensor hidden_;  // `.grad` while a late gradient is accumulated
  at::Tensor delta_;   // late gradients of this backward
  at::Tensor aside_;   // content that takes no part in a weighted average
  at::Tensor kept_;    // content of a silent slot, as it was
};

}  // namespace unisono
