#pragma once

#include <unisono/process_group.h>

#include <cstdint>
#include <vector>

#include "reducer/backward_message.h"

namespace unisono {

/// Learns from synchronising backwards: in which order gradients become ready, and which parameters stay silent.
class ReadyOrder {
 public:
  /// Starts from reverse registration order: the last layer's gradients come first.
  explicit ReadyOrder(std::size_t parameters);

  /// The order the next plan is made in.
  const std::vector<std::size_t>& order() const { return order_; }

  /// Gradient `index` became ready in this backward.
  void observe(std::size_t index) {
    if (!learnt_) observed_.push_back(index);
  }
  /// The backward ended well on all ranks; `fired`: what became ready here. `known`: on rank 0 an order was observed.
  void end_of_backward(const Bitmap& fired, bool known);
  /// A synchronisation without a backward here.
  void end_without_backward(bool known) { learnt_ = learnt_ || known; }
  void forget_observed() { observed_.clear(); }

  /// Whether a plan by observed order is due. The same on all ranks: it depends on the count of good backwards only.
  bool wants_rebuild() const { return learnt_ && !agreed_; }
  /// *Collective*. *Blocks*. Takes rank 0's observed order as everybody's.
  void agree(ProcessGroup& group, std::int64_t step);

  /// Whether a bucket should wait for this parameter. Known when the graph was walked; else guessed: not when it was
  /// silent in the last three backwards. Three, so that two losses taken in turn, each with its own parameters, do not
  /// look like silence.
  bool expects(std::size_t index) const { return walked_.empty() ? silent_for_[index] < 3 : walked_[index]; }
  /// The next backward reaches these parameters; several forwards before it reach what any of them does.
  void expect(const std::vector<bool>& reached) {
    walked_.resize(reached.size(), false);
    for (std::size_t i = 0; i < reached.size(); ++i) walked_[i] = walked_[i] || reached[i];
  }
  void forget_walk() { walked_.clear(); }

 private:
  std::vector<std::size_t> order_;
  std::vector<std::size_t> observed_;
  std::vector<std::uint8_t> silent_for_;
  std::vector<bool> walked_;
  bool any_silent_ = false;
  bool learnt_ = false;
  bool agreed_ = false;
};

}  // namespace unisono
