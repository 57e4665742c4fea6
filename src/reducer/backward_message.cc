#include "reducer/backward_message.h"

#include <algorithm>

namespace unisono {

bool Bitmap::any() const {
  return std::any_of(words_.begin(), words_.end(), [](std::uint64_t w) { return w != 0; });
}

void BackwardMessage::write(ControlRecord& record) const {
  for (const Bitmap* map : {&abandoned, &produced, &late, &silent}) {
    record.words.insert(record.words.end(), map->words().begin(), map->words().end());
  }
}

void BackwardMessage::read(const ControlRecord& record) {
  auto from = record.words.begin();
  for (Bitmap* map : {&abandoned, &produced, &late, &silent}) {
    std::copy_n(from, map->words().size(), map->words().begin());
    from += static_cast<std::ptrdiff_t>(map->words().size());
  }
}

}  // namespace unisono
