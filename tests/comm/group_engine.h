#pragma once

#include <unisono/make_group.h>

#include <memory>
#include <string>

#include "comm/issuer/engine.h"

namespace unisono::testing {

/// An engine over any group: what is between hosts where there are none. Like MPI's it moves bytes, and reduces them in
/// the tree's order. Notices go through `store` under `place`; there are none without one.
std::unique_ptr<Engine> make_group_engine(std::shared_ptr<ProcessGroup> group, std::shared_ptr<Store> store = nullptr,
                                          std::string place = "notices");

}  // namespace unisono::testing
