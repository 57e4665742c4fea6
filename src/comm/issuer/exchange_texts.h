#pragma once

#include <string>
#include <vector>

#include "comm/issuer/engine.h"

namespace unisono {

/// Every rank's text, in rank order, over an engine that no issuer has yet. *Collective*. *Blocks*. *Throws* `timeout`,
/// and what the engine throws.
std::vector<std::string> exchange_texts(Engine& engine, const std::string& text, std::chrono::nanoseconds timeout);

}  // namespace unisono
