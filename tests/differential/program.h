#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "differential/model.h"

namespace unisono::differential {

inline constexpr int kMaxRanks = 4;

/// One forward and its backward on every rank. Of what differs between ranks there is one entry per rank.
struct Micro {
  std::vector<Call> calls;
  std::vector<double> weights;   // of weight(loss, n); empty: a plain loss
  std::vector<bool> takes_part;  // only of what runs under no_sync: whether this rank does it at all
  bool sync = true;
  bool side = false;          // backward from the side loss only
  int backwards = 1;          // 2: the first one retains the graph
  bool grad_first = false;    // autograd::grad of the same loss goes before
  bool inner = false;         // calls the module, not the wrapper
  bool weighs_early = false;  // weight(loss, n) once, right after forward; else before each backward
  std::uint32_t throws = 0;   // ranks whose backward (or forward) throws
  bool throws_in_forward = false;
  std::uint32_t throws_armed = 0;  // those of them whose backward reaches a parameter first; set by `foresee`
};

enum class Edit { none, zero_to_none, zero_in_place, clear, replace, relayout, scale };
const char* name_of(Edit edit);

/// What a program is made of, in the order in which it runs. After each of them ranks and reference are compared.
struct Action {
  enum class Kind { freeze, unfreeze, edit, backward, sync_grads, step };
  Kind kind = Kind::backward;
  Edit edit = Edit::none;
  int parameter = 0;          // of freeze, unfreeze and edits of one gradient
  std::vector<Micro> micros;  // of backward: one, or two whose forwards both go first
  std::uint64_t seed = 0;     // of replace
};

/// A window and what surrounds it: what may be left out of a program without making it another kind of program.
struct Round {
  std::vector<Action> actions;
};
using Program = std::vector<Round>;

struct ProgramLimits {
  int world = 2;
  bool weighted = false;
  bool momentum = false;
  bool zero_to_none = true;
  bool uneven_accumulation = false;
};

Program draw_program(Draw& draw, const ModelSpec& model, const ProgramLimits& limits);
/// Works out which throwing ranks reach a parameter before they throw. Needs a look at the autograd graph: runs the
/// models.
void foresee(Program& program, const ModelSpec& model, bool uneven_accumulation);
std::string describe(const Program& program);
std::string describe(const Action& action);

}  // namespace unisono::differential
