#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace unisono {

// Environment variables with a type. An empty value counts as not set. *Throws* `invalid_argument` naming the variable,
// its value and what was expected. *Threads*: reading is safe as long as nobody calls setenv.

std::optional<std::string> env_string(const char* name);
std::optional<std::int64_t> env_int(const char* name, std::int64_t least = INT64_MIN, std::int64_t most = INT64_MAX);
/// 1, true, yes, on and 0, false, no, off, in any case.
std::optional<bool> env_bool(const char* name);
/// Seconds, a fraction allowed; not negative.
std::optional<std::chrono::nanoseconds> env_seconds(const char* name);

}  // namespace unisono
