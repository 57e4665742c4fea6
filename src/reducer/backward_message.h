#pragma once

#include <unisono/control_record.h>

#include <cstdint>
#include <string>
#include <vector>

namespace unisono {

/// A set of parameter indices, one bit each.
class Bitmap {
 public:
  explicit Bitmap(std::size_t bits = 0) : bits_(bits), words_((bits + 63) / 64) {}
  void set(std::size_t i) { words_[i / 64] |= std::uint64_t{1} << (i % 64); }
  void clear(std::size_t i) { words_[i / 64] &= ~(std::uint64_t{1} << (i % 64)); }
  bool test(std::size_t i) const { return words_[i / 64] >> (i % 64) & 1; }
  bool any() const;
  /// "0, 2, 5"
  std::string list() const;
  void clear() { words_.assign(words_.size(), 0); }
  std::size_t size() const { return bits_; }
  const std::vector<std::uint64_t>& words() const { return words_; }
  std::vector<std::uint64_t>& words() { return words_; }

 private:
  std::size_t bits_;
  std::vector<std::uint64_t> words_;
};

/// A small number of each rank; every rank writes its own, so that a bitwise or brings them together.
class PerRank {
 public:
  explicit PerRank(int world_size) : words_((static_cast<std::size_t>(world_size) + 7) / 8) {}
  static constexpr int kMost = 255;  ///< stands for everything above, too
  void set(int rank, int value);
  int of(int rank) const;
  std::vector<std::uint64_t>& words() { return words_; }

 private:
  std::vector<std::uint64_t> words_;
};

/// What the last message of a backward tells all ranks; after the exchange, the union over ranks: everything here is
/// made for a bitwise or.
struct BackwardMessage {
  BackwardMessage(int world_size, std::size_t parameters)
      : abandoned(static_cast<std::size_t>(world_size)),
        produced(parameters),
        late(parameters),
        silent(parameters),
        observed(1),
        joined(static_cast<std::size_t>(world_size)),
        nonfinite(parameters),
        nonfinite_ranks(static_cast<std::size_t>(world_size)),
        backwards(world_size),
        replicas(static_cast<std::size_t>(world_size)) {}

  Bitmap abandoned;                     ///< ranks that threw in this backward
  Bitmap produced;                      ///< parameters with a gradient since the last synchronisation
  Bitmap late;                          ///< parameters with a gradient that came after their bucket had left
  Bitmap silent;                        ///< parameters without a gradient
  Bitmap observed;                      ///< one bit: rank 0 has seen in which order gradients become ready
  Bitmap joined;                        ///< ranks that have no more inputs
  Bitmap nonfinite;                     ///< parameters whose gradient held an infinity or NaN on some rank ...
  Bitmap nonfinite_ranks;               ///< ... and which ranks
  PerRank backwards;                    ///< how many backwards a rank sums up; 0: it does not say
  std::vector<std::uint64_t> replicas;  ///< a sample of each rank's parameters; 0: it does not say

  void write(ControlRecord& record);
  /// From the words behind the first `skip`.
  void read(const ControlRecord& record, std::size_t skip);
  void clear();

 private:
  std::vector<std::vector<std::uint64_t>*> all();
};

}  // namespace unisono
