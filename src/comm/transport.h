#pragma once

#include <unisono/make_group.h>

#include <memory>
#include <span>
#include <string>

namespace unisono {

/// A line of the table from which `make_group` chooses.
struct Transport {
  const char* name;
  /// Why it cannot serve these options here, and what to do; empty when it can. Contacts no peer.
  std::string (*why_not)(const GroupOptions&);
  /// As `make_group`, for options that it can serve.
  std::shared_ptr<ProcessGroup> (*make)(const GroupOptions&);
  bool automatic = true;  ///< whether "auto" may choose it
};

/// Those that need torch, in order of preference. Two definitions: c10d/transports.cc in the library, and the empty one
/// of without_torch/transports.cc in programs of the torch-free core.
std::span<const Transport> torch_transports();

}  // namespace unisono
