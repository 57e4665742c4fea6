#pragma once

#include <string>
#include <vector>

#include "differential/replica.h"

namespace unisono::differential {

/// What a rank must see of one attempt: no error, or one with all of these in its text.
struct Expected {
  std::vector<std::string> parts;
};

/// The same program in one process: a replica per rank, run one after the other, averaged when the program
/// synchronises.
class Reference {
 public:
  explicit Reference(const Case& c);

  /// After it everything below is about this action.
  void perform(const Action& action);

  std::vector<Replica>& replicas() { return replicas_; }
  const std::vector<Expected>& expected(std::size_t rank) const { return expected_[rank]; }
  /// The action ended with averages: all ranks hold the same.
  bool synchronised() const { return synchronised_; }
  /// How far gradients of a parameter may be from the reference's: 0, the same bits, unless a gradient may have come
  /// after its bucket had left. Then two averages are added where the reference averages a sum, which rounds otherwise.
  double bound(std::size_t parameter) const { return bound_[parameter]; }
  /// Where the averages are not the gradients of one worker on the union of the batches; empty when they are.
  const std::string& union_difference() const { return union_difference_; }

 private:
  struct Contribution {  // to the union batch of this window
    std::size_t rank;
    Micro micro;
    double factor;
  };

  void follow_module();
  void together(const std::vector<Micro>& micros);
  void throwing(const Micro& micro);
  void lose_step(const Micro& micro);
  void accumulate(const Micro& micro, const std::vector<at::Tensor>& losses);
  void synchronise(bool by_hand);
  void settle(std::size_t parameter, double total_weight);
  void mark_late(std::size_t parameter);
  void close_window();
  void open_window();
  void compare_with_union(double total_weight);
  void expect_strict(const std::vector<bool>& silent);

  const Case& case_;
  std::vector<Replica> replicas_;
  std::vector<std::vector<Expected>> expected_;
  std::vector<bool> hooked_;  // required grad when the wrapper last looked
  std::int64_t step_ = 0;
  bool synchronised_ = false;
  bool walk_may_miss_ = false;  // find_unused_parameters saw another graph than the backward's
  std::vector<double> bound_;
  std::string union_difference_;

  // Of the window.
  bool open_ = false;
  bool union_defined_ = true;  // nobody has touched gradients, nothing was thrown
  std::vector<at::Tensor> base_;
  std::vector<Contribution> contributions_;
};

}  // namespace unisono::differential
