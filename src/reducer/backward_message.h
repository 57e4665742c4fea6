#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <unisono/control_record.h>

namespace unisono {

/// A set of parameter indices, one bit each.
class Bitmap {
 public:
  explicit Bitmap(std::size_t bits = 0) : bits_(bits), words_((bits + 63) / 64) {}
  void set(std::size_t i) { words_[i / 64] |= std::uint64_t{1} << (i % 64); }
  void clear(std::size_t i) { words_[i / 64] &= ~(std::uint64_t{1} << (i % 64)); }
  bool test(std::size_t i) const { return words_[i / 64] >> (i % 64) & 1; }
  bool any() const;
  void clear() { words_.assign(words_.size(), 0); }
  std::size_t size() const { return bits_; }
  const std::vector<std::uint64_t>& words() const { return words_; }
  std::vector<std::uint64_t>& words() { return words_; }

 private:
  std::size_t bits_;
  std::vector<std::uint64_t> words_;
};

/// What the last message of a backward tells all ranks; after the exchange, the union over ranks.
/// Everything here is a set, so that a bitwise or is the union.
struct BackwardMessage {
  BackwardMessage(int world_size, std::size_t parameters)
      : abandoned(static_cast<std::size_t>(world_size)), produced(parameters), late(parameters), silent(parameters) {}

  Bitmap abandoned;  ///< ranks that threw in this backward
  Bitmap produced;   ///< parameters with a gradient since the last synchronisation
  Bitmap late;       ///< parameters with a gradient that came after their bucket had left
  Bitmap silent;     ///< parameters without a gradient

  void write(ControlRecord& record) const;
  void read(const ControlRecord& record);
};

}  // namespace unisono
