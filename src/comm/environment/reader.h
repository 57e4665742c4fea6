#pragma once

#include <unisono/error.h>

#include <charconv>
#include <optional>
#include <string>
#include <system_error>

#include "comm/environment/environment.h"

namespace unisono {

[[noreturn]] inline void refuse_start(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "unisono::init: " + what);
}

/// Environment variables as this library takes them: an empty one is not set.
class EnvironmentReader {
 public:
  explicit EnvironmentReader(const Lookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = lookup_(name);
    if (value && value->empty()) value.reset();
    return value;
  }
  bool has(const std::string& name) const { return text(name).has_value(); }

  /// With its value, as errors and `Environment::evidence` have it.
  std::string shown(const std::string& name) const {
    auto value = text(name);
    return value ? name + "=" + *value : name + " (not set)";
  }

  /// *Throws* `invalid_argument` unless it is a whole number.
  template <class Number = int>
  Number number(const std::string& name) const {
    const std::string value = text(name).value_or("");
    Number out = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
    if (error != std::errc{} || end != value.data() + value.size())
      refuse_start(name + "='" + value + "' is not a whole number. Set it to one, or unset it.");
    return out;
  }

 private:
  const Lookup& lookup_;
};

}  // namespace unisono
