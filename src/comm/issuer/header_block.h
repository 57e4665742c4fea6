#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "comm/issuer/call_header.h"

namespace unisono {

/// What a rank sends in one exchange: how many of its calls with a priority have ended; the data of short calls whose
/// headers went before; and the headers of its next calls, as many as it has and as fit, each with its control record,
/// and a short call's data, where they fit too. All ranks' blocks have the same size, which they know beforehand, so
/// that ranks which disagree about everything else can still read each other; a slow link is asked once for many calls.
/// Travels as bytes between equal machines.
class HeaderBlock {
 public:
  static constexpr std::size_t kHeaders = 1024;  ///< bytes for the headers, beside what follows and the room for data

  /// The size with `following` bytes of earlier calls' data in so many pieces, and room for `room` bytes of new ones'.
  static std::size_t size_with(const std::vector<std::size_t>& following, std::size_t room);

  /// `ended`: see ServiceOrder.
  HeaderBlock(std::int64_t ended, std::size_t size);
  /// Adds the data of an earlier call. Before any call is added.
  void follow(const void* data, std::size_t bytes);
  /// Adds a call. False when it does not fit. The first call of a block always does, if need be without its record,
  /// which `header.record_follows` then says. `data` of a short call, else empty; `header.data_comes` says whether it
  /// came along. What fits depends on the calls alone, so that equal calls make equal blocks.
  bool add(CallHeader& header, const std::vector<std::uint64_t>& record, std::span<const std::byte> data);
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

  /// One rank's block, received; points into it.
  struct Read {
    std::int64_t ended = 0;
    std::vector<const void*> followed;
    std::vector<CallHeader> headers;
    std::vector<std::vector<std::uint64_t>> records;  ///< empty where it follows
    std::vector<const void*> data;                    ///< null where it follows, or there is none
  };
  static Read read(const std::uint8_t* bytes, std::size_t size, const std::vector<std::size_t>& following);

 private:
  struct Prefix {
    std::int64_t ended = 0;
    std::uint64_t calls = 0;
  };

  static std::size_t padded(std::size_t bytes) { return (bytes + 15) / 16 * 16; }
  void put(const void* from, std::size_t size);

  Prefix prefix_;
  std::size_t end_ = sizeof(Prefix);
  std::vector<std::uint8_t> bytes_;
};

}  // namespace unisono
