#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace unisono {

inline std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// What an exception of torch's says, without the backtrace.
inline std::string first_line(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  return first_line(torch ? torch->what_without_backtrace() : error.what());
}

}  // namespace unisono
