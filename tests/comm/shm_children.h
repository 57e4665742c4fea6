#pragma once

#include <cstddef>

namespace unisono::testing {

// Agreed between shm_peer_test.cc, whose process is rank 0, and the other ranks in shm_children.cc.

inline constexpr std::size_t kSharedBytes = 1 << 20;
inline constexpr std::size_t kLargeBytes = 4 << 20;
/// How a child ends when all went as its scenario says.
inline constexpr int kAsExpected = 42;

}  // namespace unisono::testing
