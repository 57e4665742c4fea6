#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "comm/issuer/call_header.h"

namespace unisono {

/// What a rank sends in one exchange: how many of its calls with a priority have ended, and the headers of its next
/// calls, as many as it has and as fit, each with its control record where that fits too. Always the same size, so that
/// ranks which disagree about everything else can still read each other; a slow link is asked once for many calls.
/// Travels as bytes between equal machines.
class HeaderBlock {
 public:
  static constexpr std::size_t kSize = 1024;

  /// `ended`: see ServiceOrder.
  explicit HeaderBlock(std::int64_t ended);
  /// Adds a call. False when it does not fit. The first call of a block always does, if need be without its record,
  /// which `header.record_follows` then says. What fits depends on the calls alone, so that equal calls make equal
  /// blocks.
  bool add(CallHeader& header, const std::vector<std::uint64_t>& record);
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

  /// One rank's block, received.
  struct Read {
    std::int64_t ended = 0;
    std::vector<CallHeader> headers;
    std::vector<std::vector<std::uint64_t>> records;  ///< empty where it follows
  };
  static Read read(const std::uint8_t* bytes);

 private:
  struct Prefix {
    std::int64_t ended = 0;
    std::uint64_t calls = 0;
  };

  void put(std::size_t at, const void* from, std::size_t size) { std::memcpy(bytes_.data() + at, from, size); }

  Prefix prefix_;
  std::size_t end_ = sizeof(Prefix);
  std::vector<std::uint8_t> bytes_;
};

}  // namespace unisono
