#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace example {

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// 1234567 as "1,234,567".
inline std::string with_commas(double value) {
  const std::string digits = std::to_string(static_cast<long long>(value + 0.5));
  std::string out;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

/// "1 rank", "2 ranks".
inline std::string count(int n, const std::string& thing) {
  return std::to_string(n) + " " + thing + (n == 1 ? "" : "s");
}

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  char line[512];
  std::snprintf(line, sizeof line, pattern, args...);
  return line;
}

/// Shows how far a run is: one line overwritten on a terminal, a plain line every few seconds elsewhere.
/// `unisono run` hands its workers a pseudo-terminal in every case and says in UNISONO_PROGRESS which of the two to do.
class Progress {
 public:
  /// Only one rank should speak.
  explicit Progress(bool speaks) : speaks_(speaks), overwrite_(speaks && may_overwrite()) {}

  /// `text` is how things stand; shown when the last showing is long enough ago, or `now` insists.
  void show(const std::string& text, bool now = false) {
    const double time = seconds_now();
    if (!speaks_ || (!now && time - shown_ < (overwrite_ ? 0.2 : 10))) return;
    shown_ = time;
    std::printf(overwrite_ ? "%s\x1b[K\r" : "%s\n", text.c_str());
    std::fflush(stdout);
  }
  /// A line that stays.
  void say(const std::string& text) {
    if (!speaks_) return;
    std::printf(overwrite_ ? "%s\x1b[K\n" : "%s\n", text.c_str());
    std::fflush(stdout);
  }
  /// "1:05" for 65 seconds.
  static std::string minutes(double seconds) {
    const int whole = static_cast<int>(seconds + 0.5);
    return format("%d:%02d", whole / 60, whole % 60);
  }

 private:
  static bool may_overwrite() {
    if (const char* how = std::getenv("UNISONO_PROGRESS")) return std::string(how) == "overwrite";
    return isatty(STDOUT_FILENO) != 0 && std::getenv("TORCHELASTIC_RUN_ID") == nullptr;
  }

  bool speaks_;
  bool overwrite_;
  double shown_ = 0;
};

}  // namespace example
