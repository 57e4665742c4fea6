#include "differential/case.h"

namespace unisono::differential {
namespace {

constexpr std::array kCaps = {-1.0, 0.0, 0.0001, 0.001};  // MiB; -1: none given

std::string text_of(std::optional<double> cap) {
  if (!cap) return "default";
  return *cap == 0 ? "0" : *cap < 0.0005 ? "0.0001" : "0.001";
}

const char* text_of(bool b) { return b ? "yes" : "no"; }

template <typename Predicate>
bool any_micro(const Case& c, Predicate predicate) {
  for (const Round& round : c.program) {
    for (const Action& action : round.actions) {
      for (const Micro& micro : action.micros) {
        if (predicate(action, micro)) return true;
      }
    }
  }
  return false;
}

bool any_action(const Case& c, Action::Kind kind) {
  for (const Action& action : actions_of(c.program)) {
    if (action.kind == kind) return true;
  }
  return false;
}

}  // namespace

Case draw_case(std::uint64_t seed) {
  Draw draw(seed * 0x2545f4914f6cdd1du + 1);
  Case c{.seed = seed};
  c.world = draw.of(std::vector{1, 2, 2, 2, 2, 2, 3, 3, 4});
  const double cap = kCaps[static_cast<std::size_t>(draw.below(4))];
  if (cap >= 0) c.options.bucket_cap_mb = cap;
  c.options.gradient_as_bucket_view = draw.percent(60);
  c.options.overlap = draw.percent(75);
  c.options.naive = draw.percent(12);
  c.options.find_unused_parameters = draw.percent(30);
  c.options.static_graph = draw.percent(25);
  c.options.strict = draw.percent(12);
  c.options.uneven_accumulation = draw.percent(40);
  c.options.check_replicas = draw.percent(75);
  c.weighted = draw.percent(40);
  c.momentum = draw.percent(50);
  c.zero_to_none = draw.percent(60);
  c.model = draw_model(draw);
  c.program =
      draw_program(draw, c.model, {c.world, c.weighted, c.momentum, c.zero_to_none, c.options.uneven_accumulation});
  foresee(c.program, c.model, c.options.uneven_accumulation);
  return c;
}

std::vector<Action> actions_of(const Program& program) {
  std::vector<Action> actions;
  for (const Round& round : program) actions.insert(actions.end(), round.actions.begin(), round.actions.end());
  return actions;
}

std::vector<std::pair<std::string, std::string>> factors_of(const Case& c) {
  const auto& o = c.options;
  return {
      {"world size", std::to_string(c.world)},
      {"bucket_cap_mb", text_of(o.bucket_cap_mb)},
      {"gradient_as_bucket_view", text_of(o.gradient_as_bucket_view)},
      {"overlap", text_of(o.overlap)},
      {"naive", text_of(o.naive)},
      {"find_unused_parameters", text_of(o.find_unused_parameters)},
      {"static_graph", text_of(o.static_graph)},
      {"strict", text_of(o.strict)},
      {"uneven_accumulation", text_of(o.uneven_accumulation)},
      {"check_replicas", text_of(o.check_replicas)},
      {"weights", text_of(c.weighted)},
      {"momentum", text_of(c.momentum)},
      {"set_to_none", text_of(c.zero_to_none)},
      {"reentrant", text_of(c.model.reentrant())},
      {"no_sync", text_of(any_micro(c, [](auto&, const Micro& m) { return !m.sync; }))},
      {"throws", text_of(any_micro(c, [](auto&, const Micro& m) { return m.throws != 0; }))},
      {"two forwards first", text_of(any_micro(c, [](const Action& a, auto&) { return a.micros.size() > 1; }))},
      {"sync_grads", text_of(any_action(c, Action::Kind::sync_grads))},
      {"freezes", text_of(any_action(c, Action::Kind::freeze))},
  };
}

std::string describe(const Case& c) {
  std::string text = "case " + std::to_string(c.seed) + "\n  ";
  for (const auto& [name, value] : factors_of(c)) text += name + "=" + value + " ";
  return text + "\n  model: " + describe(c.model) + "\n" + describe(c.program);
}

}  // namespace unisono::differential
