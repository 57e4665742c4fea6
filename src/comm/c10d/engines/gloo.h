#pragma once

#include <string>

#include "comm/c10d/torch_engine.h"

namespace unisono {

/// Why this build has no Gloo, and what to do; empty when it has. gloo.cc or no_gloo.cc, as cmake/gloo.cmake has found.
std::string why_no_gloo();
/// `TorchEngine::start`, over the interfaces of GLOO_SOCKET_IFNAME, else the one that the host's name resolves to.
c10::intrusive_ptr<c10d::Backend> start_gloo(const EngineStart& start);

}  // namespace unisono
