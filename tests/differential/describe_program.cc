#include <array>
#include <cstdio>

#include "differential/program.h"

namespace unisono::differential {
namespace {

std::string number(double value) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

std::string ranks_in(std::uint32_t set) {
  std::string text;
  for (int r = 0; r < kMaxRanks; ++r) {
    if (set >> r & 1) text += (text.empty() ? "" : ",") + std::to_string(r);
  }
  return text;
}

std::string describe(const Micro& m) {
  std::string text = m.sync ? "backward" : "backward under no_sync";
  if (m.side) text += " of the side loss";
  if (m.backwards > 1) text += " twice";
  if (m.grad_first) text += " after autograd::grad";
  if (m.weighs_early && !m.weights.empty()) text += " weighed at once";
  if (m.inner) text += " of the inner module";
  if (m.throws != 0) {
    text += ", throwing in " + std::string(m.throws_in_forward ? "forward" : "backward") + " on " + ranks_in(m.throws);
    if (m.throws_armed != 0) text += " (past the first gradient on " + ranks_in(m.throws_armed) + ")";
  }
  for (std::size_t r = 0; r < m.calls.size(); ++r) {
    const Call& call = m.calls[r];
    text += "\n        rank " + std::to_string(r) + ": ";
    if (!m.takes_part[r]) {
      text += "-";
      continue;
    }
    std::string bits;
    for (int b = 0; b < 6; ++b) bits += call.mask >> b & 1 ? '1' : '0';
    text += "bits " + bits;
    if (!m.weights.empty()) text += ", weight " + number(m.weights[r]);
    if (call.nan) text += ", NaN";
    if (call.throw_in_forward >= 0) text += ", throws after node " + std::to_string(call.throw_in_forward);
    if (call.throw_in_backward >= 0) text += ", throws before node " + std::to_string(call.throw_in_backward);
  }
  return text;
}

}  // namespace

const char* name_of(Edit edit) {
  constexpr std::array kNames = {"none",           "zero_grad to none",      "zero_grad in place", "clear",
                                 "replace by new", "give another layout to", "scale in place"};
  return kNames[static_cast<std::size_t>(edit)];
}

std::string describe(const Action& action) {
  const std::string parameter = " parameter " + std::to_string(action.parameter);
  switch (action.kind) {
    case Action::Kind::freeze:
      return "freeze" + parameter;
    case Action::Kind::unfreeze:
      return "unfreeze" + parameter;
    case Action::Kind::sync_grads:
      return "sync_grads";
    case Action::Kind::step:
      return "optimizer step";
    case Action::Kind::edit:
      if (action.edit == Edit::zero_to_none || action.edit == Edit::zero_in_place) return name_of(action.edit);
      return name_of(action.edit) + std::string(" the gradient of") + parameter;
    case Action::Kind::backward:
      break;
  }
  std::string text = action.micros.size() > 1 ? "both forwards, then: " : "";
  for (const Micro& m : action.micros) text += (&m == &action.micros.front() ? "" : "\n      ... and ") + describe(m);
  return text;
}

std::string describe(const Program& program) {
  std::string text;
  int index = 0;
  for (const Round& round : program) {
    text += "  round\n";
    for (const Action& action : round.actions)
      text += "    " + std::to_string(index++) + ": " + describe(action) + "\n";
  }
  return text;
}

}  // namespace unisono::differential
