#include "stats/json.h"

#include <cstdio>

namespace unisono {
namespace {

/// Length of the UTF-8 sequence at the front of `s`, 0 when there is none (RFC 3629: no overlong forms, no surrogates).
std::size_t utf8_length(std::string_view s) {
  const auto byte = [&](std::size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
  const auto continues = [&](std::size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return continues(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const bool shortest = first != 0xe0 || byte(1) >= 0xa0;
    const bool surrogate = first == 0xed && byte(1) >= 0xa0;
    return continues(1) && continues(2) && shortest && !surrogate ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool shortest = first != 0xf0 || byte(1) >= 0x90;
    const bool beyond = first == 0xf4 && byte(1) >= 0x90;
    return continues(1) && continues(2) && continues(3) && shortest && !beyond ? 4 : 0;
  }
  return 0;
}

}  // namespace

std::string json_string(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const char c = text.front();
    const std::size_t length = utf8_length(text);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else if (length == 0) {
      out += "\xef\xbf\xbd";
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out + '"';
}

}  // namespace unisono
