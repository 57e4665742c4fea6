#pragma once

#include <unisono/control_record.h>

#include <cstddef>
#include <vector>

namespace unisono::shm {

/// The record as bytes: words, then sums.
void write_record(const ControlRecord& record, std::byte* to);
/// One record out of all ranks': words or-ed, sums added as a balanced tree over ranks. `shape` gives the sizes.
ControlRecord combine_records(const std::vector<const std::byte*>& records, const ControlRecord& shape);

}  // namespace unisono::shm
