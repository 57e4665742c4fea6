#include "differential/reference.h"

#include <algorithm>

#include "differential/average.h"
#include "differential/edits.h"
#include "differential/record.h"

namespace unisono::differential {

using at::Tensor;

Reference::Reference(const Case& c) : case_(c), expected_(static_cast<std::size_t>(c.world)) {
  replicas_.reserve(static_cast<std::size_t>(c.world));  // replicas stay where they are: hooks point at them
  for (int r = 0; r < c.world; ++r) replicas_.emplace_back(c, static_cast<std::size_t>(r));
  bound_.assign(replicas_[0].size(), 0);
  for (const Tensor& p : replicas_[0].parameters) hooked_.push_back(p.requires_grad());
}

void Reference::perform(const Action& action) {
  synchronised_ = false;
  walk_may_miss_ = false;
  bound_.assign(bound_.size(), 0);
  union_difference_.clear();
  for (auto& attempts : expected_) attempts.clear();
  switch (action.kind) {
    case Action::Kind::freeze:
    case Action::Kind::unfreeze:
      for (Replica& r : replicas_) {
        r.parameters[static_cast<std::size_t>(action.parameter)].set_requires_grad(action.kind ==
                                                                                   Action::Kind::unfreeze);
      }
      break;
    case Action::Kind::edit:
      if (open_) union_defined_ = false;
      if (action.edit == Edit::zero_to_none) close_window();  // it begins anew
      for (Replica& r : replicas_) apply_edit(action, r.parameters);
      break;
    case Action::Kind::step:
      for (Replica& r : replicas_) r.sgd.step();
      break;
    case Action::Kind::sync_grads:
      open_window();
      for (Replica& r : replicas_) r.fires.assign(r.size(), 0);
      for (auto& attempts : expected_) attempts.emplace_back();
      synchronise(/*by_hand=*/true);
      break;
    case Action::Kind::backward:
      follow_module();
      open_window();
      if (action.micros.front().throws != 0) {
        throwing(action.micros.front());
      } else {
        together(action.micros);
      }
  }
}

// The wrapper's forward takes over what has been frozen or unfrozen, and learns from the start.
void Reference::follow_module() {
  for (std::size_t p = 0; p < hooked_.size(); ++p) {
    if (hooked_[p] == replicas_[0].parameters[p].requires_grad()) continue;
    hooked_[p] = !hooked_[p];
    for (Replica& r : replicas_) r.silent_for.assign(r.size(), 0);
  }
}

void Reference::together(const std::vector<Micro>& micros) {
  if (case_.options.find_unused_parameters) {
    // Checkpoints hide their parameters from the walk, and one walk may stand for two graphs.
    walk_may_miss_ = case_.model.reentrant();
    for (const Micro& m : micros) walk_may_miss_ |= micros.size() > 1 && m.inner;
  }
  std::vector<std::vector<Tensor>> losses;
  for (const Micro& micro : micros) {
    losses.emplace_back();
    for (Replica& r : replicas_) {
      losses.back().push_back(micro.takes_part[r.rank] ? r.loss(micro, micro.calls[r.rank]) : Tensor());
    }
  }
  for (std::size_t i = 0; i < micros.size(); ++i) accumulate(micros[i], losses[i]);
}

void Reference::accumulate(const Micro& micro, const std::vector<Tensor>& losses) {
  for (int b = 0; b < micro.backwards; ++b) {
    open_window();
    for (Replica& r : replicas_) {
      if (!losses[r.rank].defined()) continue;
      expected_[r.rank].emplace_back();
      r.backward(micro, losses[r.rank], b + 1 < micro.backwards);
      contributions_.push_back({r.rank, micro, micro.weights.empty() ? 1 : micro.weights[r.rank]});
    }
    if (micro.sync) synchronise(/*by_hand=*/false);
  }
}

void Reference::throwing(const Micro& micro) {
  Micro good = micro;
  for (Call& call : good.calls) call.throw_in_forward = call.throw_in_backward = -1;
  for (const Replica& r : replicas_) {
    if (micro.throws >> r.rank & 1) expected_[r.rank].push_back({{kOwnError}});
  }
  if (!micro.throws_in_forward) {
    if (micro.sync && micro.throws_armed != 0) lose_step(micro);
    if (!micro.sync) {
      for (const Replica& r : replicas_) {
        if (!(micro.throws >> r.rank & 1)) expected_[r.rank].emplace_back();
      }
    }
    if (micro.throws_armed != 0 || !micro.sync) {
      for (Replica& r : replicas_) r.model->zero_grad(/*set_to_none=*/!micro.sync || case_.zero_to_none);
      close_window();
    }
  }
  together({good});
}

// Every rank that did not throw past its first gradient is told which ranks did.
void Reference::lose_step(const Micro& micro) {
  std::string ranks;
  for (const Replica& r : replicas_) {
    if (micro.throws_armed >> r.rank & 1) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r.rank);
  }
  for (const Replica& r : replicas_) {
    if (micro.throws_armed >> r.rank & 1) continue;
    expected_[r.rank].push_back({{"rank " + ranks + " threw in its backward of step " + std::to_string(step_) + ";"}});
  }
  for (Replica& r : replicas_) {
    for (std::size_t p = 0; p < hooked_.size(); ++p) {
      if (hooked_[p]) r.parameters[p].mutable_grad().reset();  // what they held differs between ranks
    }
  }
  ++step_;
}

void Reference::synchronise(bool by_hand) {
  const std::size_t count = replicas_[0].size();
  std::vector<bool> silent(count, false);
  double total = 0;  // exact in any order: halves of small integers
  for (const Replica& r : replicas_) total += r.weight;
  for (std::size_t p = 0; p < count; ++p) {
    if (!hooked_[p]) continue;
    for (Replica& r : replicas_) {
      // Cleared since: as if it had not been.
      if (r.fires[p] == 0 && !r.parameters[p].grad().defined()) r.produced[p] = false;
      silent[p] = silent[p] || !r.produced[p];
    }
    mark_late(p);
    settle(p, total);
  }
  if (union_defined_) compare_with_union(total);
  for (Replica& r : replicas_) {
    for (std::size_t p = 0; p < count && !by_hand; ++p) r.silent_for[p] = r.fires[p] > 0 ? 0 : r.silent_for[p] + 1;
  }
  if (case_.options.strict) expect_strict(silent);
  ++step_;
  synchronised_ = true;
  close_window();
}

void Reference::mark_late(std::size_t p) {
  if (!case_.options.overlap || case_.options.naive) return;
  bool may = walk_may_miss_;
  double magnitude = 0;
  for (const Replica& r : replicas_) {
    may |= r.fires[p] > 1 || (r.fires[p] > 0 && r.silent_for[p] >= 3);
    double held = 0;
    if (const Tensor& grad = r.parameters[p].grad(); grad.defined() && grad.numel() > 0) {
      held = grad.abs().max().to(at::kDouble).item<double>();
    }
    magnitude = std::max(magnitude, held + r.magnitude[p]);
  }
  if (may) bound_[p] += 4 * epsilon_of(replicas_[0].parameters[p].scalar_type()) * magnitude;
}

void Reference::settle(std::size_t p, double total) {
  const bool weighted = replicas_[0].weighted;
  bool produced = false;
  for (const Replica& r : replicas_) produced |= r.produced[p];
  if (!produced) return;  // untouched, undefined or not
  std::vector<Tensor> contents;
  for (Replica& r : replicas_) {
    Tensor held = r.parameters[p].grad();
    if (weighted && !r.opened[p]) {
      r.aside[p] = copy_of(held);
      held.reset();
    }
    contents.push_back(held.defined() ? held : at::zeros_like(r.parameters[p], at::MemoryFormat::Contiguous));
  }
  const Tensor mean = average(contents, weighted ? std::optional(total) : std::nullopt);
  for (Replica& r : replicas_) {
    Tensor own = mean.clone();
    if (r.aside[p].defined()) own.add_(r.aside[p]);
    r.parameters[p].mutable_grad() = own;
  }
}

void Reference::expect_strict(const std::vector<bool>& silent) {
  const auto names = replicas_[0].model->named_parameters();
  std::vector<std::string> parts;
  for (std::size_t p = 0; p < silent.size() && parts.size() < 8; ++p) {
    if (silent[p]) parts.push_back("'" + names[p].key() + "'");
  }
  if (parts.empty()) return;
  parts.push_back("in step " + std::to_string(step_));
  for (auto& attempts : expected_) attempts.back() = {parts};
}

void Reference::open_window() {
  if (open_) return;
  open_ = true;
  union_defined_ = true;
  base_.clear();
  for (const Tensor& p : replicas_[0].parameters) base_.push_back(copy_of(p.grad()));
}

void Reference::close_window() {
  for (Replica& r : replicas_) r.close_window();
  contributions_.clear();
  open_ = false;
}

}  // namespace unisono::differential
