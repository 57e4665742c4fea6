#include "base/env.h"

#include <unisono/error.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace unisono {
namespace {

[[noreturn]] void fail(const char* name, const std::string& value, const std::string& expected) {
  throw Error(ErrorCode::invalid_argument,
              "environment variable " + std::string(name) + " is '" + value + "'; it must be " + expected);
}

template <typename T>
bool parse(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

std::string range(std::int64_t least, std::int64_t most) {
  std::string text = "a whole number";
  if (least != INT64_MIN) text += " of at least " + std::to_string(least);
  if (most != INT64_MAX) text += (least != INT64_MIN ? " and at most " : " of at most ") + std::to_string(most);
  return text;
}

}  // namespace

std::optional<std::string> env_string(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<std::int64_t> env_int(const char* name, std::int64_t least, std::int64_t most) {
  const auto text = env_string(name);
  if (!text) return std::nullopt;
  std::int64_t value = 0;
  if (!parse(*text, value) || value < least || value > most) fail(name, *text, range(least, most));
  return value;
}

std::optional<bool> env_bool(const char* name) {
  const auto text = env_string(name);
  if (!text) return std::nullopt;
  for (const char* yes : {"1", "true", "yes", "on"}) {
    if (strcasecmp(text->c_str(), yes) == 0) return true;
  }
  for (const char* no : {"0", "false", "no", "off"}) {
    if (strcasecmp(text->c_str(), no) == 0) return false;
  }
  fail(name, *text, "1, true, yes or on, or 0, false, no or off");
}

std::optional<std::chrono::nanoseconds> env_seconds(const char* name) {
  const auto text = env_string(name);
  if (!text) return std::nullopt;
  constexpr double kMost = 9e9;  // nanoseconds must fit
  double seconds = 0;
  if (!parse(*text, seconds) || !std::isfinite(seconds) || seconds < 0 || seconds > kMost) {
    fail(name, *text, "a number of seconds from 0 to 9e9");
  }
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

}  // namespace unisono
