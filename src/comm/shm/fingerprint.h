#pragma once

#include <optional>
#include <string>

#include "comm/shm/layout.h"

namespace unisono::shm {

/// "all_reduce(sum, f32, 2 elements, gradients of step 3, bucket 1)"
std::string describe(const Fingerprint& fingerprint);

/// What differs between the ranks' calls, in the same words on all ranks; empty when they agree.
/// Call only when all ranks have entered.
std::optional<std::string> find_mismatch(const ControlSegment& segment, std::uint64_t sequence,
                                         const std::string& group);

}  // namespace unisono::shm
