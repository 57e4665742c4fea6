#include "comm/c10d/notice_board.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kPatience(500);
constexpr std::chrono::milliseconds kPause(20);  // between two looks for signs

}  // namespace

// What the thread and the board share. A request is written down and the thread makes one round: it posts what there is
// to post and reads all notices.
struct StoreNoticeBoard::Talk {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t asked = 0;  // rounds
  std::uint64_t answered = 0;
  bool stop = false;
  bool broken = false;  // the store has failed
  std::thread thread;
  std::optional<std::string> failure_to_post;
  std::optional<std::int64_t> waiting_to_post;
  std::optional<Error> failure;
  std::vector<std::int64_t> at;  // per rank: the call it waits in, as far as known
  bool asks = false;             // everybody for a sign
  std::vector<bool> signs;       // per rank
  // The thread's own after it has started.
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  std::string prefix;
  bool signed_here = false;

  std::string key(const std::string& name) const { return prefix + name; }

  void round(std::optional<std::string> cause, std::optional<std::int64_t> waiting, bool asking) {
    if (asking) store->set(key("roll"), "called");
    const bool called = store->check({key("roll")});
    if (called && !std::exchange(signed_here, true)) store->set(key("sign/" + std::to_string(rank)), "here");
    if (cause && !store->check({key("failed")})) store->set(key("failed"), *cause);
    if (waiting) store->set(key("at/" + std::to_string(rank)), std::to_string(*waiting));
    std::optional<Error> read;
    if (store->check({key("failed")})) {
      const std::string text = store->get_to_str(key("failed"));
      const auto space = text.find(' ');
      read.emplace(static_cast<ErrorCode>(std::stoi(text.substr(0, space))), text.substr(space + 1));
    }
    std::vector<std::int64_t> now(at.size(), -1);
    for (std::size_t r = 0; r < now.size(); ++r) {
      const std::string place = key("at/" + std::to_string(r));
      if (store->check({place})) now[r] = std::stoll(store->get_to_str(place));
    }
    std::vector<bool> here(at.size(), false);
    for (std::size_t r = 0; asking && r < here.size(); ++r) here[r] = store->check({key("sign/" + std::to_string(r))});
    const std::lock_guard lock(mutex);
    if (!failure) failure = read;
    at = now;
    if (asking) signs = here;
  }

  void run() {
    pthread_setname_np(pthread_self(), "uni-notices");
    bool own_connection = false;
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return stop || (asked > answered && !broken); });
      if (asked == answered || broken) return;
      const std::uint64_t now = asked;
      auto cause = std::exchange(failure_to_post, std::nullopt);
      auto waiting = std::exchange(waiting_to_post, std::nullopt);
      const bool asking = asks;
      lock.unlock();
      bool failed = false;
      try {
        if (!std::exchange(own_connection, true))
          store = store->clone();  // another thread may block on the shared connection
        round(std::move(cause), waiting, asking);
      } catch (
          ...) {  // a notice that cannot be delivered changes nothing: the engine's own error or the deadline comes anyway
        failed = true;
      }
      lock.lock();
      broken = broken || failed;
      answered = now;
      changed.notify_all();
    }
  }

  // Asks for a round, and waits for it unless an earlier one is overdue. With the lock held.
  void talk(const std::shared_ptr<Talk>& self, std::unique_lock<std::mutex>& lock) {
    if (!store || broken || stop) return;
    const bool hears = asked == answered;
    const std::uint64_t mine = ++asked;
    if (!thread.joinable()) thread = std::thread([self] { self->run(); });
    changed.notify_all();
    if (hears) changed.wait_for(lock, kPatience, [&] { return answered >= mine || broken; });
  }
};

// Counting the adapters that this rank has put over the group keeps the notices of an earlier, failed one apart.
StoreNoticeBoard::StoreNoticeBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : talk_(std::make_shared<Talk>()) {
  talk_->rank = rank;
  talk_->at.assign(static_cast<std::size_t>(size), -1);
  if (!store) return;
  try {
    const auto number = store->add("unisono/adapter/" + std::to_string(rank), 1);
    talk_->prefix = "unisono/adapter/notice/" + std::to_string(number) + "/";
    talk_->store = std::move(store);
  } catch (const std::exception&) {  // no store, no notices
  }
}

StoreNoticeBoard::~StoreNoticeBoard() {
  std::unique_lock lock(talk_->mutex);
  talk_->stop = true;
  talk_->changed.notify_all();
  const bool hears =
      talk_->changed.wait_for(lock, kPatience, [this] { return talk_->asked == talk_->answered || talk_->broken; });
  std::thread thread = std::move(talk_->thread);
  lock.unlock();
  if (thread.joinable()) hears ? thread.join() : thread.detach();
}

void StoreNoticeBoard::post_failure(const Error& cause) noexcept {
  std::unique_lock lock(talk_->mutex);
  talk_->failure_to_post = std::to_string(static_cast<int>(cause.code())) + " " + cause.what();
  talk_->talk(talk_, lock);
}

std::optional<Error> StoreNoticeBoard::failure() noexcept {
  std::unique_lock lock(talk_->mutex);
  talk_->talk(talk_, lock);
  return talk_->failure;
}

void StoreNoticeBoard::post_waiting(std::int64_t sequence) noexcept {
  std::unique_lock lock(talk_->mutex);
  talk_->waiting_to_post = sequence;
  talk_->talk(talk_, lock);
}

std::vector<int> StoreNoticeBoard::absent(std::int64_t sequence) noexcept {
  std::unique_lock lock(talk_->mutex);
  talk_->talk(talk_, lock);
  std::vector<int> out;
  if (!talk_->store || talk_->broken || talk_->asked != talk_->answered) return out;
  for (std::size_t r = 0; r < talk_->at.size(); ++r)
    if (static_cast<int>(r) != talk_->rank && talk_->at[r] < sequence) out.push_back(static_cast<int>(r));
  return out;
}

std::vector<int> StoreNoticeBoard::unheard(std::chrono::milliseconds patience) noexcept {
  const auto end = std::chrono::steady_clock::now() + patience;
  std::unique_lock lock(talk_->mutex);
  talk_->asks = true;
  std::vector<int> out;
  while (true) {
    talk_->talk(talk_, lock);
    if (!talk_->store || talk_->broken || talk_->asked != talk_->answered) return {};
    out.clear();
    for (std::size_t r = 0; r < talk_->signs.size(); ++r)
      if (!talk_->signs[r]) out.push_back(static_cast<int>(r));
    const auto left = end - std::chrono::steady_clock::now();
    if (out.empty() || talk_->failure || left.count() <= 0) return out;
    talk_->changed.wait_for(lock, std::min<std::chrono::nanoseconds>(left, kPause));
  }
}

std::string StoreNoticeBoard::silence() noexcept {
  const std::lock_guard lock(talk_->mutex);
  if (talk_->broken) return "the group's store, which rank 0 or the launcher hosts, has failed";
  if (talk_->asked != talk_->answered)
    return "the group's store, which rank 0 or the launcher hosts, does not answer either: is the link cut?";
  return "";
}

}  // namespace unisono
