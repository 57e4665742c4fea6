#include "comm/rendezvous.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <future>
#include <map>
#include <mutex>

#include "comm/process_identity.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

// What earlier runs wrote stays in it, as in a file.
class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::optional<std::string> get(const std::string& key, std::chrono::nanoseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return values_.contains(key); })) return std::nullopt;
    return values_[key];
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    const std::lock_guard lock(mutex_);
    return counters_[key] += amount;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::int64_t> counters_;
};

std::future<std::string> joining(MemoryStore& store, int rank, int size, std::chrono::nanoseconds timeout = 20s) {
  return std::async(std::launch::async,
                    [&store, rank, size, timeout] { return join_round(store, rank, size, "u", timeout); });
}

std::string failure(std::future<std::string> joined, ErrorCode code) {
  try {
    joined.get();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "joined";
}

// A process that ran once: its number and start time, read while it lived.
ProcessIdentity dead_process() {
  auto identity = ProcessIdentity::self();
  identity.started = "1";  // this number, another start: its number was reused
  return identity;
}

// Another process that runs: this one's parent.
ProcessIdentity other_process() {
  auto identity = ProcessIdentity::self();
  const auto text = parent_identity();
  identity.pid = getppid();
  identity.started = text.substr(text.find('-') + 1);
  return identity;
}

TEST(ProcessIdentity, TellsLivingFromDead) {
  EXPECT_TRUE(ProcessIdentity::self().alive());
  EXPECT_TRUE(other_process().alive());
  EXPECT_FALSE(dead_process().alive());
  auto elsewhere = dead_process();
  elsewhere.place = "another-boot/pid:[1]";
  EXPECT_TRUE(elsewhere.alive()) << "what cannot be seen counts as running";
  EXPECT_EQ(ProcessIdentity::parse(dead_process().to_string()), dead_process());
  EXPECT_THROW(ProcessIdentity::parse("nonsense"), Error);
}

TEST(Rendezvous, RanksMeetInOneRound) {
  MemoryStore store;
  auto one = joining(store, 1, 3);
  auto two = joining(store, 2, 3);
  const auto zero = joining(store, 0, 3).get();
  EXPECT_EQ(zero, one.get());
  EXPECT_EQ(zero, two.get());
}

TEST(Rendezvous, TheSameProcessesMeetAgainInAnother) {
  MemoryStore store;
  std::string before;
  for (int round = 0; round < 3; ++round) {
    auto one = joining(store, 1, 2);
    const auto zero = joining(store, 0, 2).get();
    EXPECT_EQ(zero, one.get());
    EXPECT_NE(zero, before);
    before = zero;
  }
}

TEST(Rendezvous, ARunThatWasKilledIsPassedOver) {
  MemoryStore store;
  store.add("u/rounds", 1);
  store.set("u/round/1/rank/0", dead_process().to_string());
  store.set("u/round/1/rank/1", dead_process().to_string());
  store.add("u/round/1/rank/1/claims", 1);
  auto one = joining(store, 1, 2);  // comes first and must not join the old round
  const auto zero = joining(store, 0, 2).get();
  EXPECT_EQ(zero, "u/round/2");
  EXPECT_EQ(one.get(), zero);
}

TEST(Rendezvous, ARankZeroKilledWhileItWaitedIsPassedOver) {
  MemoryStore store;
  store.add("u/rounds", 1);
  store.set("u/round/1/rank/0", dead_process().to_string());
  auto one = joining(store, 1, 2);
  const auto zero = joining(store, 0, 2).get();
  EXPECT_EQ(zero, "u/round/2");
  EXPECT_EQ(one.get(), zero);
}

TEST(Rendezvous, ARankZeroKilledBeforeItWroteItsNameIsPassedOver) {
  MemoryStore store;
  store.add("u/rounds", 1);
  auto one = joining(store, 1, 2);
  const auto zero = joining(store, 0, 2).get();
  EXPECT_EQ(one.get(), zero);
}

TEST(Rendezvous, MissingRanksAreNamed) {
  MemoryStore store;
  EXPECT_NE(failure(joining(store, 1, 2, 100ms), ErrorCode::timeout).find("missing rank 0."), std::string::npos);
  MemoryStore another;
  auto one = joining(another, 1, 4, 200ms);
  EXPECT_NE(failure(joining(another, 0, 4, 200ms), ErrorCode::timeout).find("missing ranks 2, 3."), std::string::npos);
  EXPECT_NE(failure(std::move(one), ErrorCode::timeout).find("missing ranks 2, 3."), std::string::npos);
}

TEST(Rendezvous, ARankZeroThatRunsTwiceIsNamedEverywhere) {
  MemoryStore store;
  store.add("u/rounds", 1);
  store.set("u/round/1/rank/0", other_process().to_string());
  const std::string first = "pid " + std::to_string(getppid());
  const std::string second = "pid " + std::to_string(getpid());
  auto one = joining(store, 1, 3);  // joins round 1 and waits for rank 2
  ASSERT_TRUE(store.get("u/round/1/rank/1", 20s));
  const auto text = failure(joining(store, 0, 3), ErrorCode::invalid_argument);
  EXPECT_NE(text.find("rank 0 of 3 is claimed by " + first), std::string::npos) << text;
  EXPECT_NE(text.find(second), std::string::npos) << text;
  EXPECT_EQ(failure(std::move(one), ErrorCode::invalid_argument), text);
}

TEST(Rendezvous, AnyOtherRankThatRunsTwiceIsNamedToo) {
  MemoryStore store;
  auto zero = joining(store, 0, 3);
  ASSERT_TRUE(store.get("u/round/1/rank/0", 20s));
  store.add("u/round/1/rank/1/claims", 1);
  store.set("u/round/1/rank/1", other_process().to_string());
  const auto text = failure(joining(store, 1, 3), ErrorCode::invalid_argument);
  EXPECT_NE(text.find("rank 1 of 3 is claimed by pid " + std::to_string(getppid())), std::string::npos) << text;
  EXPECT_EQ(failure(std::move(zero), ErrorCode::invalid_argument), text);
}

}  // namespace
}  // namespace unisono
