#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "comm/issuer/engine.h"

namespace unisono {

/// A message that is about as short as its header travels like one: what each rank gives is gathered by all, and each
/// makes the result itself. It goes along with the header where there is room, else with the next headers, so that it
/// never costs a message of its own. Sums are the balanced tree over ranks whatever the engine, and the same bits
/// either way.
class ShortCalls {
 public:
  explicit ShortCalls(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  /// All-reduces, broadcasts and all-gathers of CPU memory whose contributions are together at most 64 KiB: half a
  /// millisecond at 1 Gbit/s.
  bool is_short(const DataCall& call) const;

  /// How many bytes the ranks leave for data in their next headers: as much as short calls lately needed. All ranks
  /// know the same, for it is learnt from what they have agreed on.
  std::size_t room() const;
  /// `bytes` of the contributions of short calls that an exchange has made known.
  void learn(std::size_t bytes);

 private:
  std::size_t ranks_;
  std::array<std::size_t, 8> lately_{};
  std::size_t next_ = 0;
};

/// What a rank gives.
std::size_t contribution_bytes(Operation operation, std::uint64_t count, Dtype dtype);
const void* contribution(const DataCall& call);
/// Makes the result of what all ranks gave, in rank order.
void finish_short(const DataCall& call, const std::vector<const void*>& given, double divisor);

}  // namespace unisono
