#include "comm/shm/rounds.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "comm/reduce_kernels.h"
#include "comm/shm/event.h"

namespace unisono::shm {
namespace {

template <typename Member>
bool all_reached(const Team& team, Member member, std::uint64_t count) {
  for (int r = 0; r < team.size; ++r) {
    if ((team.segment.words(r).*member).load() < count) return false;
  }
  return true;
}

}  // namespace

Rounds::Rounds(const Team& team, const Transfer& transfer, std::uint64_t base)
    : team_(team), transfer_(transfer), base_(base) {
  const std::size_t element = size_of(transfer_.dtype);
  const std::size_t room = kChunkBytes / (transfer_.scatters() ? static_cast<std::size_t>(team.size) : 1);
  piece_elements_ = room / kLine * kLine / element;
  rounds_ = (transfer_.block + piece_elements_ - 1) / piece_elements_;
}

Rounds::Piece Rounds::piece(std::uint64_t round) const {
  const std::size_t begin = round * piece_elements_;
  return {begin, std::min(piece_elements_, transfer_.block - begin)};
}

std::byte* Rounds::buffer(int rank, std::uint64_t round) const {
  return chunk_buffer(team_.staging[static_cast<std::size_t>(rank)], base_ + round);
}

// A buffer is free when all have taken what it held kChunkBuffers rounds ago.
bool Rounds::can_put() const {
  if (put_ == rounds_) return false;
  const std::uint64_t next = base_ + put_ + 1;
  return next <= kChunkBuffers || all_reached(team_, &RankWords::taken, next - kChunkBuffers);
}

bool Rounds::can_reduce() const {
  return reduces() && reduced_ < put_ && all_reached(team_, &RankWords::published, base_ + reduced_ + 1);
}

bool Rounds::can_take() const {
  const std::uint64_t needed = base_ + taken_ + 1;
  if (reduces()) return taken_ < reduced_ && all_reached(team_, &RankWords::reduced, needed);
  if (taken_ == put_) return false;
  if (transfer_.operation == Operation::broadcast)
    return team_.segment.words(transfer_.root).published.load() >= needed;
  return all_reached(team_, &RankWords::published, needed);
}

bool Rounds::waits_for(int rank) const {
  const RankWords& words = team_.segment.words(rank);
  if (put_ < rounds_ && base_ + put_ + 1 > kChunkBuffers && words.taken.load() < base_ + put_ + 1 - kChunkBuffers)
    return true;
  if (reduces() && words.reduced.load() < base_ + taken_ + 1) return true;
  return words.published.load() < base_ + taken_ + 1;
}

bool Rounds::run() {
  bool moved = false;
  for (;;) {
    if (can_take()) {
      take();
    } else if (can_reduce()) {
      reduce();
    } else if (can_put()) {
      put();
    } else {
      return moved;
    }
    moved = true;
  }
}

void Rounds::announce(std::atomic<std::uint64_t>& word, std::uint64_t count) {
  word.store(base_ + count);
  auto& event = team_.segment.head().event;
  if (anybody_sleeps(event)) wake_all(event);
}

void Rounds::put() {
  const Piece p = piece(put_);
  const std::size_t element = size_of(transfer_.dtype);
  std::byte* to = buffer(team_.rank, put_);
  if (transfer_.scatters()) {
    for (std::size_t r = 0; r < static_cast<std::size_t>(team_.size); ++r) {
      std::memcpy(to + r * p.count * element, transfer_.in + (r * transfer_.block + p.begin) * element,
                  p.count * element);
    }
  } else if (transfer_.operation != Operation::broadcast || transfer_.root == team_.rank) {
    std::memcpy(to, transfer_.in + p.begin * element, p.count * element);
  }
  announce(team_.segment.words(team_.rank).published, ++put_);
}

void Rounds::reduce() {
  const Piece p = piece(reduced_);
  const std::size_t element = size_of(transfer_.dtype);
  const Slice mine = slice_of(p.count, element, team_.rank, team_.size);
  if (mine.count > 0) {
    std::array<const void*, kMaxRanks> inputs;
    const auto n = static_cast<std::size_t>(team_.size);
    for (std::size_t r = 0; r < n; ++r) inputs[r] = buffer(static_cast<int>(r), reduced_) + mine.begin * element;
    void* outputs[] = {buffer(team_.rank, reduced_) + mine.begin * element};
    tree_reduce(std::span(inputs.data(), n), outputs, mine.count, transfer_.dtype, transfer_.op, transfer_.divisor);
  }
  announce(team_.segment.words(team_.rank).reduced, ++reduced_);
}

void Rounds::take() {
  const Piece p = piece(taken_);
  const std::size_t element = size_of(transfer_.dtype);
  std::byte* out = transfer_.out + p.begin * element;
  const std::size_t bytes = p.count * element;
  const auto n = static_cast<std::size_t>(team_.size);
  if (reduces()) {
    for (int r = 0; r < team_.size; ++r) {
      const Slice s = slice_of(p.count, element, r, team_.size);
      if (s.count > 0) std::memcpy(out + s.begin * element, buffer(r, taken_) + s.begin * element, s.count * element);
    }
  } else if (transfer_.operation == Operation::broadcast) {
    if (transfer_.root != team_.rank) std::memcpy(out, buffer(transfer_.root, taken_), bytes);
  } else if (transfer_.operation == Operation::reduce_scatter) {
    std::array<const void*, kMaxRanks> inputs;
    for (std::size_t r = 0; r < n; ++r)
      inputs[r] = buffer(static_cast<int>(r), taken_) + static_cast<std::size_t>(team_.rank) * bytes;
    void* outputs[] = {out};
    tree_reduce(std::span(inputs.data(), n), outputs, p.count, transfer_.dtype, transfer_.op, transfer_.divisor);
  } else {
    const std::size_t within = transfer_.scatters() ? static_cast<std::size_t>(team_.rank) * bytes : 0;
    for (std::size_t r = 0; r < n; ++r) {
      std::memcpy(out + r * transfer_.block_bytes(), buffer(static_cast<int>(r), taken_) + within, bytes);
    }
  }
  announce(team_.segment.words(team_.rank).taken, ++taken_);
}

}  // namespace unisono::shm
