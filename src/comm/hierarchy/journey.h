#pragma once

#include <unisono/process_group.h>

#include <chrono>
#include <functional>
#include <memory>

#include "comm/issuer/engine.h"

namespace unisono {

/// The three stretches of a call in two levels; an empty one is passed over. Each has ways of its own, so that calls
/// follow each other through them, each stretch in the order of the calls. What they read and write they hold
/// themselves.
struct Journey {
  std::function<Work()> collect;                  ///< inside the host
  std::function<EngineOp(double divisor)> cross;  ///< between hosts; of one operation, or of two that are staged
  std::function<Work()> spread;                   ///< inside the host
  std::function<void(double divisor)> finish;     ///< brings the result to where it belongs
};

/// Starts it. The operation has four stages whatever is passed over, for stages are what keeps calls in order.
EngineOp begin(Journey journey);

/// An operation of a host's group as one of an engine.
EngineOp local(Work work);

/// Of a call inside a host; `what` it is about, a literal.
CallOptions local_options(const char* what, std::chrono::milliseconds timeout);

}  // namespace unisono
