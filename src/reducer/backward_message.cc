#include "reducer/backward_message.h"

#include <algorithm>

namespace unisono {

bool Bitmap::any() const {
  return std::any_of(words_.begin(), words_.end(), [](std::uint64_t w) { return w != 0; });
}

std::string Bitmap::list() const {
  std::string text;
  for (std::size_t i = 0; i < bits_; ++i) {
    if (test(i)) text += (text.empty() ? "" : ", ") + std::to_string(i);
  }
  return text;
}

void PerRank::set(int rank, int value) {
  const auto shift = static_cast<unsigned>(rank % 8 * 8);
  std::uint64_t& word = words_[static_cast<std::size_t>(rank / 8)];
  word &= ~(std::uint64_t{0xff} << shift);
  word |= static_cast<std::uint64_t>(std::clamp(value, 0, kMost)) << shift;
}

int PerRank::of(int rank) const {
  return static_cast<int>(words_[static_cast<std::size_t>(rank / 8)] >> static_cast<unsigned>(rank % 8 * 8) & 0xff);
}

std::vector<std::vector<std::uint64_t>*> BackwardMessage::all() {
  return {&abandoned.words(), &produced.words(), &late.words(),      &silent.words(),
          &observed.words(),  &joined.words(),   &nonfinite.words(), &nonfinite_ranks.words(),
          &backwards.words(), &replicas};
}

void BackwardMessage::write(ControlRecord& record) {
  for (const auto* words : all()) record.words.insert(record.words.end(), words->begin(), words->end());
}

void BackwardMessage::read(const ControlRecord& record, std::size_t skip) {
  auto from = record.words.begin() + static_cast<std::ptrdiff_t>(skip);
  for (auto* words : all()) {
    std::copy_n(from, words->size(), words->begin());
    from += static_cast<std::ptrdiff_t>(words->size());
  }
}

void BackwardMessage::clear() {
  for (auto* words : all()) words->assign(words->size(), 0);
}

}  // namespace unisono
