#pragma once

#include <string>

namespace unisono {

/// `name` for as long as the process lives: tags of messages are told in errors when who made them may be gone.
const char* kept_name(const std::string& name);

}  // namespace unisono
