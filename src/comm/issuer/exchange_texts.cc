#include "comm/issuer/exchange_texts.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/clock.h"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::uint8_t> gather(Engine& engine, const void* block, std::size_t bytes, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  EngineOp op = engine.gather_bytes(block, bytes, std::max(left, std::chrono::milliseconds(1)));
  while (!op.done()) {
    if (Clock::now() > deadline) {
      engine.abort(Error(ErrorCode::timeout, "a start that took too long"));
      throw Error(
          ErrorCode::timeout,
          "unisono " + engine.info().name + " group, rank " + std::to_string(engine.info().rank) + " of " +
              std::to_string(engine.info().size) +
              ": not all ranks told where they are in time. Was every rank started, and does each make this group?");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  op.check();
  return op.gathered();
}

}  // namespace

std::vector<std::string> exchange_texts(Engine& engine, const std::string& text, std::chrono::nanoseconds timeout) {
  const auto deadline = deadline_after(timeout);
  const std::uint64_t own = text.size();
  const auto sizes = gather(engine, &own, sizeof own, deadline);
  std::vector<std::uint64_t> lengths(sizes.size() / sizeof own);
  std::memcpy(lengths.data(), sizes.data(), sizes.size());
  const std::size_t longest = std::max<std::size_t>(1, *std::max_element(lengths.begin(), lengths.end()));
  std::string padded = text;
  padded.resize(longest);
  const auto all = gather(engine, padded.data(), longest, deadline);
  std::vector<std::string> out;
  for (std::size_t rank = 0; rank < lengths.size(); ++rank)
    out.emplace_back(reinterpret_cast<const char*>(all.data()) + rank * longest, lengths[rank]);
  return out;
}

}  // namespace unisono
