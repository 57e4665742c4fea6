#pragma once

#include <unisono/options.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "differential/program.h"

namespace unisono::differential {

/// Everything that is done, from one seed.
struct Case {
  std::uint64_t seed = 0;
  int world = 2;
  ModelSpec model;
  DistributedDataParallelOptions options;
  bool momentum = false;
  bool zero_to_none = true;
  bool weighted = false;
  Program program;
};

Case draw_case(std::uint64_t seed);
std::string describe(const Case& c);
std::vector<Action> actions_of(const Program& program);

/// What is crossed, pair by pair: name and value of each option and of what the model and the program have in them.
std::vector<std::pair<std::string, std::string>> factors_of(const Case& c);

}  // namespace unisono::differential
