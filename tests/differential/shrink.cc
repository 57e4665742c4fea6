#include "differential/shrink.h"

#include <vector>

namespace unisono::differential {
namespace {

using Change = std::function<bool(Case&)>;  // false: changes nothing

// Whether an action may be left out of its round: not the backward that closes the window.
bool optional(const Round& round, std::size_t index) {
  const Action& action = round.actions[index];
  if (action.kind == Action::Kind::sync_grads) return false;
  return action.kind != Action::Kind::backward || !action.micros.front().sync;
}

bool drop_rounds(Case& c, const std::function<bool(const Case&)>& fails) {
  bool any = false;
  for (std::size_t i = c.program.size(); i-- > 0;) {
    Case smaller = c;
    smaller.program.erase(smaller.program.begin() + static_cast<std::ptrdiff_t>(i));
    if (smaller.program.empty() || !fails(smaller)) continue;
    c = std::move(smaller);
    any = true;
  }
  return any;
}

bool drop_actions(Case& c, const std::function<bool(const Case&)>& fails) {
  bool any = false;
  for (std::size_t r = 0; r < c.program.size(); ++r) {
    for (std::size_t i = c.program[r].actions.size(); i-- > 0;) {
      if (!optional(c.program[r], i)) continue;
      Case smaller = c;
      smaller.program[r].actions.erase(smaller.program[r].actions.begin() + static_cast<std::ptrdiff_t>(i));
      if (!fails(smaller)) continue;
      c = std::move(smaller);
      any = true;
    }
  }
  return any;
}

bool drop_options(Case& c, const std::function<bool(const Case&)>& fails) {
  bool any = false;
  const auto attempt = [&](const Change& change) {
    Case smaller = c;
    if (!change(smaller) || !fails(smaller)) return;
    c = std::move(smaller);
    any = true;
  };
  const auto set = [](auto& value, auto to) { return std::exchange(value, to) != to; };
  attempt([&](Case& s) { return set(s.options.naive, false); });
  attempt([&](Case& s) { return set(s.options.static_graph, false); });
  attempt([&](Case& s) { return set(s.options.find_unused_parameters, false); });
  attempt([&](Case& s) { return set(s.options.overlap, true); });
  attempt([&](Case& s) { return set(s.options.gradient_as_bucket_view, true); });
  attempt([&](Case& s) { return set(s.momentum, false); });
  attempt([&](Case& s) {
    return s.options.bucket_cap_mb && *s.options.bucket_cap_mb != 0 && (s.options.bucket_cap_mb = 0);
  });
  attempt([&](Case& s) {
    const bool had = s.options.bucket_cap_mb.has_value();
    s.options.bucket_cap_mb.reset();
    return had;
  });
  return any;
}

}  // namespace

Case shrink(Case c, const std::function<bool(const Case&)>& fails) {
  bool smaller = true;
  while (smaller) {
    smaller = drop_rounds(c, fails);
    smaller |= drop_actions(c, fails);
    smaller |= drop_options(c, fails);
  }
  return c;
}

}  // namespace unisono::differential
