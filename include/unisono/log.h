#pragma once

#include <functional>
#include <string_view>

namespace unisono {

enum class LogLevel { debug, info, warning };

/// Receives what the library has to say. The library itself never prints: without a sink, messages go nowhere.
/// *Threads*: called from any thread, possibly several at once; must not throw and must not call back into unisono.
using LogSink = std::function<void(LogLevel, std::string_view)>;

}  // namespace unisono
