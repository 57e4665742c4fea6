#pragma once

#include <string>

#include "comm/c10d/torch_engine.h"

namespace unisono {

/// Why NCCL cannot be used from this build or on this machine, and what to do; empty when it can. nccl.cc or
/// no_nccl.cc, as cmake/nccl.cmake has found.
std::string why_no_nccl();
/// `TorchEngine::start`, on the calling thread's present device (`c10::cuda::set_device`, LOCAL_RANK's as a rule).
c10::intrusive_ptr<c10d::Backend> start_nccl(const EngineStart& start);

}  // namespace unisono
