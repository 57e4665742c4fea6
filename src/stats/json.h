#pragma once

#include <string>
#include <string_view>

namespace unisono {

/// `text` as a JSON string with its quotes. Bytes that are not UTF-8 become U+FFFD, so that the result is always valid.
std::string json_string(std::string_view text);

}  // namespace unisono
