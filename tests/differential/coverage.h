#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "differential/case.h"

namespace unisono::differential {

/// Which pairs of values of two factors (see `factors_of`) have been seen in one case.
class Coverage {
 public:
  void add(const Case& c);
  /// Pairs seen, of how many between the values seen.
  std::string summary() const;
  std::vector<std::string> uncovered() const;
  /// A row per factor: how many cases had each value.
  std::string table() const;

 private:
  std::vector<std::string> names_;
  std::map<std::string, std::map<std::string, int>> counts_;
  std::set<std::string> pairs_;
};

}  // namespace unisono::differential
