#include "comm/c10d/notice_board.h"

#include <utility>

namespace unisono {
namespace {

// A notice that cannot be delivered changes nothing: the engine's own error or the deadline comes anyway.
template <typename Body>
void attempt(c10::intrusive_ptr<c10d::Store>& store, bool& own, Body body) noexcept {
  if (!store) return;
  try {
    if (!std::exchange(own, true)) store = store->clone();  // another thread may block on the shared connection
    body(*store);
  } catch (...) {
    store.reset();
  }
}

}  // namespace

// Counting the adapters that this rank has put over the group keeps the notices of an earlier, failed one apart.
StoreNoticeBoard::StoreNoticeBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), size_(size) {
  if (!store_) return;
  try {
    const auto number = store_->add("unisono/adapter/" + std::to_string(rank_), 1);
    prefix_ = "unisono/adapter/notice/" + std::to_string(number) + "/";
  } catch (const std::exception&) {
    store_.reset();
  }
}

void StoreNoticeBoard::post_failure(const Error& cause) noexcept {
  attempt(store_, own_connection_, [&](c10d::Store& store) {
    if (store.check({key("failed")})) return;
    store.set(key("failed"), std::to_string(static_cast<int>(cause.code())) + " " + cause.what());
  });
}

std::optional<Error> StoreNoticeBoard::failure() noexcept {
  std::optional<Error> out;
  attempt(store_, own_connection_, [&](c10d::Store& store) {
    if (!store.check({key("failed")})) return;
    const std::string text = store.get_to_str(key("failed"));
    const auto space = text.find(' ');
    out.emplace(static_cast<ErrorCode>(std::stoi(text.substr(0, space))), text.substr(space + 1));
  });
  return out;
}

void StoreNoticeBoard::post_waiting(std::int64_t sequence) noexcept {
  attempt(store_, own_connection_,
          [&](c10d::Store& store) { store.set(key("at/" + std::to_string(rank_)), std::to_string(sequence)); });
}

std::vector<int> StoreNoticeBoard::absent(std::int64_t sequence) noexcept {
  std::vector<int> out;
  attempt(store_, own_connection_, [&](c10d::Store& store) {
    for (int rank = 0; rank < size_; ++rank) {
      const std::string at = key("at/" + std::to_string(rank));
      if (rank == rank_) continue;
      if (!store.check({at}) || std::stoll(store.get_to_str(at)) < sequence) out.push_back(rank);
    }
  });
  return out;
}

}  // namespace unisono
