#pragma once

#include <string>
#include <string_view>

namespace unisono {

/// Writes `content` to `path` so that the file appears whole or not at all: to a temporary file beside it, flushed to
/// disk, then renamed over it. An earlier file stays as it was when anything fails, and no temporary file is left.
/// *Throws* `invalid_argument` naming the path and the system's reason when it cannot be written.
void write_file_atomically(const std::string& path, std::string_view content);

}  // namespace unisono
