#pragma once

#include <string>

namespace unisono::testing {

/// Plays one rank of a scene in which something goes wrong outside of the library's hands, and prints "rank R: ..."
/// lines for tests/python/test_mpi.py to read. Returns the exit code.
int play(const std::string& name);

}  // namespace unisono::testing
