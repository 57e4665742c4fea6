#include "differential/coverage.h"

namespace unisono::differential {
namespace {

std::string pair_of(const std::string& a, const std::string& x, const std::string& b, const std::string& y) {
  return a + "=" + x + " with " + b + "=" + y;
}

}  // namespace

void Coverage::add(const Case& c) {
  const auto factors = factors_of(c);
  const bool first = names_.empty();
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const auto& [name, value] = factors[i];
    if (first) names_.push_back(name);
    ++counts_[name][value];
    for (std::size_t j = 0; j < i; ++j) pairs_.insert(pair_of(factors[j].first, factors[j].second, name, value));
  }
}

std::vector<std::string> Coverage::uncovered() const {
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      for (const auto& [x, nx] : counts_.at(names_[j])) {
        for (const auto& [y, ny] : counts_.at(names_[i])) {
          const std::string pair = pair_of(names_[j], x, names_[i], y);
          if (!pairs_.contains(pair)) missing.push_back(pair);
        }
      }
    }
  }
  return missing;
}

std::string Coverage::summary() const {
  return std::to_string(pairs_.size()) + " pairs of options seen, " + std::to_string(uncovered().size()) + " not";
}

std::string Coverage::table() const {
  std::string text;
  for (const std::string& name : names_) {
    text += "  " + name + ":";
    for (const auto& [value, count] : counts_.at(name)) text += "  " + value + " " + std::to_string(count);
    text += "\n";
  }
  return text;
}

}  // namespace unisono::differential
