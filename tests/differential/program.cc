#include "differential/program.h"

namespace unisono::differential {
namespace {

class Drawing {
 public:
  Drawing(Draw& draw, const ModelSpec& model, const ProgramLimits& limits)
      : draw_(draw), model_(model), limits_(limits) {
    RandomModel probe(model, 0);
    for (const auto& p : probe.parameters()) trainable_.push_back(p.requires_grad());
    frozen_.assign(trainable_.size(), false);
    freezes_ = draw.percent(35);
    last_weight_ = static_cast<int>(trainable_.size()) - (model.nodes.back().flag ? 2 : 1);
  }

  Round round() {
    Round round;
    into_ = &round.actions;
    weighted_ = limits_.weighted && draw_.percent(70);
    const bool by_hand = draw_.percent(12);
    everybody_ = weighted_ && by_hand;  // a rank that gave no weight would call another operation
    if (freezes_ && draw_.percent(40)) freeze_or_unfreeze();
    if (draw_.percent(35)) edit();
    for (int n = draw_.percent(45) ? 1 + draw_.below(3) : 0; n > 0; --n) {
      backward(false);
      // In a weighted window what gradients held before is set aside: but for clearing all of them, edits are refused.
      if (draw_.percent(25)) weighted_ ? clear_all() : edit();
    }
    if (by_hand) {
      into_->push_back({.kind = Action::Kind::sync_grads});
    } else {
      backward(true);
    }
    if (draw_.percent(50)) into_->push_back({.kind = Action::Kind::step});
    if (draw_.percent(70)) into_->push_back({.kind = Action::Kind::edit, .edit = zero()});
    return round;
  }

 private:
  Edit zero() const { return limits_.zero_to_none ? Edit::zero_to_none : Edit::zero_in_place; }
  int some_parameter() { return draw_.below(static_cast<int>(trainable_.size())); }

  bool everybody() const { return everybody_ || freezes_ || (!weighted_ && !limits_.uneven_accumulation); }

  void freeze_or_unfreeze() {
    const int p = some_parameter();
    const auto index = static_cast<std::size_t>(p);
    if (!trainable_[index] || p == 0 || p == last_weight_) return;
    frozen_[index] = !frozen_[index];
    into_->push_back({.kind = frozen_[index] ? Action::Kind::freeze : Action::Kind::unfreeze, .parameter = p});
  }

  void clear_all() {
    if (draw_.percent(40)) into_->push_back({.kind = Action::Kind::edit, .edit = Edit::zero_to_none});
  }

  void edit() {
    const Edit edit = static_cast<Edit>(1 + draw_.below(6));
    into_->push_back({.kind = Action::Kind::edit, .edit = edit, .parameter = some_parameter(), .seed = draw_.next()});
  }

  void backward(bool sync) {
    Action action{.kind = Action::Kind::backward};
    action.micros.push_back(micro(sync));
    if (draw_.percent(sync ? 20 : 10)) {
      action.micros.push_back(micro(sync));
    } else if (draw_.percent(12)) {
      make_throw(action.micros.front());
    }
    into_->push_back(std::move(action));
  }

  Micro micro(bool sync) {
    Micro micro{.sync = sync};
    const bool alike = draw_.percent(50);  // all ranks use the same nodes
    const auto mask = static_cast<std::uint32_t>(draw_.next());
    for (int r = 0; r < limits_.world; ++r) {
      micro.calls.push_back({.data = draw_.next(), .mask = alike ? mask : static_cast<std::uint32_t>(draw_.next())});
      micro.takes_part.push_back(sync || everybody() || draw_.percent(80));
      if (!weighted_) continue;
      micro.weights.push_back(draw_.percent(15) ? 0 : draw_.percent(20) ? 0.5 + draw_.below(3) : 1 + draw_.below(9));
      micro.calls.back().nan = micro.weights.back() == 0 && draw_.percent(40);
    }
    micro.side = draw_.percent(12);
    micro.backwards = draw_.percent(8) ? 2 : 1;
    micro.weighs_early = draw_.percent(50);
    micro.grad_first = !model_.reentrant() && draw_.percent(8);
    // A forward of the wrapper on all ranks is where a frozen parameter is noticed.
    micro.inner = !freezes_ && draw_.percent(8);
    return micro;
  }

  void make_throw(Micro& micro) {
    micro.throws_in_forward = draw_.percent(25);
    const int node = draw_.below(static_cast<int>(model_.nodes.size()));
    while (micro.throws == 0) micro.throws = static_cast<std::uint32_t>(draw_.below(1 << limits_.world));
    micro.side = micro.grad_first = false;
    micro.backwards = 1;
    micro.takes_part.assign(micro.takes_part.size(), true);
    for (int r = 0; r < limits_.world; ++r) {
      if (!(micro.throws >> r & 1)) continue;
      Call& call = micro.calls[static_cast<std::size_t>(r)];
      (micro.throws_in_forward ? call.throw_in_forward : call.throw_in_backward) = node;
    }
  }

  Draw& draw_;
  const ModelSpec& model_;
  const ProgramLimits& limits_;
  std::vector<bool> trainable_, frozen_;
  int last_weight_;  // like the first it is never frozen, so that every backward reaches a parameter
  bool weighted_ = false;
  bool everybody_ = false;
  bool freezes_ = false;
  std::vector<Action>* into_ = nullptr;
};

}  // namespace

Program draw_program(Draw& draw, const ModelSpec& model, const ProgramLimits& limits) {
  Drawing drawing(draw, model, limits);
  Program program;
  for (int n = 2 + draw.below(6); n > 0; --n) program.push_back(drawing.round());
  return program;
}

void foresee(Program& program, const ModelSpec& model, bool uneven_accumulation) {
  std::vector<bool> frozen(RandomModel(model, 0).parameters().size(), false);
  for (Round& round : program) {
    for (Action& action : round.actions) {
      if (action.kind == Action::Kind::freeze || action.kind == Action::Kind::unfreeze) {
        frozen[static_cast<std::size_t>(action.parameter)] = action.kind == Action::Kind::freeze;
      }
      for (Micro& micro : action.micros) {
        micro.throws_armed = 0;
        for (std::size_t r = 0; r < micro.calls.size(); ++r) {
          if (micro.throws_in_forward || !(micro.throws >> r & 1)) continue;
          if (reaches_a_parameter(model, micro.calls[r], micro.side, frozen)) {
            micro.throws_armed |= 1u << r;
          } else if (!micro.sync && micro.weights.empty() && !uneven_accumulation) {  // see excluded.h
            micro.throws &= ~(1u << r);
            micro.calls[r].throw_in_backward = -1;
          }
        }
      }
    }
  }
}

}  // namespace unisono::differential
