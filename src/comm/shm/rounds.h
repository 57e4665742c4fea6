#pragma once

#include "comm/shm/transfer.h"

namespace unisono::shm {

/// Moves data that lives in ordinary memory through the ranks' staging memory, a chunk per *round*.
///
/// In a round each rank *puts* a chunk of its input into one of its chunk buffers, for an all-reduce then *reduces* its
/// slice of the chunk over all ranks' buffers into its own buffer, and *takes* what it needs out of all buffers. Each
/// rank counts what it has put, reduced and taken; a rank goes on when all counts are far enough. With kChunkBuffers
/// buffers a rank can be some rounds ahead of its peers, so that nobody waits for the slowest step. The buffers stay in
/// the cache.
///
/// Ranks write only staging memory here, so any rank may leave in the middle without harm to anybody's data.
/// Resumable: `run` goes as far as it can without waiting.
class Rounds {
 public:
  /// `base` is how many rounds this group has made before; the same on all ranks.
  Rounds(const Team& team, const Transfer& transfer, std::uint64_t base);

  /// Whether anything moved.
  bool run();
  bool complete() const { return taken_ == rounds_; }
  std::uint64_t rounds() const { return rounds_; }
  /// Whether `run` waits for something of rank r.
  bool waits_for(int rank) const;

 private:
  struct Piece {
    std::size_t begin = 0;  // element of the block
    std::size_t count = 0;
  };
  Piece piece(std::uint64_t round) const;
  std::byte* buffer(int rank, std::uint64_t round) const;
  bool reduces() const { return transfer_.operation == Operation::all_reduce; }
  bool can_put() const;
  bool can_reduce() const;
  bool can_take() const;
  void put();
  void reduce();
  void take();
  void announce(std::atomic<std::uint64_t>& word, std::uint64_t count);

  const Team& team_;
  Transfer transfer_;
  std::uint64_t base_;
  std::size_t piece_elements_;
  std::uint64_t rounds_;
  std::uint64_t put_ = 0;
  std::uint64_t reduced_ = 0;
  std::uint64_t taken_ = 0;
};

}  // namespace unisono::shm
