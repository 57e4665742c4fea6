#pragma once

#include <unisono/make_group.h>

#include <memory>

namespace unisono {

/// A world of one: every call has ended when it returns, and moves at most this rank's own data to its output.
/// *Throws* `invalid_argument` unless rank is 0 and size 1.
std::shared_ptr<ProcessGroup> make_serial_group(const GroupOptions& options);

}  // namespace unisono
