#pragma once

#include "comm/issuer/engine.h"

namespace unisono {

/// A point in the present stream of the calling thread that another thread's stream can wait for; nothing on CPUs.
StreamFence stream_fence(const Device& device);

}  // namespace unisono
