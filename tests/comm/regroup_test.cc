#include <gtest/gtest.h>
#include <unisono/regroup.h>
#include <unisono/round_robin.h>

#include <csignal>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "comm/errors.h"
#include "comm/fake/fake_group.h"
#include "comm/shm_children.h"
#include "comm/shm_ranks.h"

// Groups made again, without some ranks, or with more.

namespace unisono::testing {
namespace {

using GroupPtr = std::shared_ptr<ProcessGroup>;
using namespace std::chrono_literals;

/// Runs `body(rank)` on threads 0 to size - 1.
void on_threads(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&body, r] {
      try {
        body(r);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << r << ": " << e.what();
      }
    });
  }
  for (auto& t : threads) t.join();
}

GroupOptions options_for(const std::shared_ptr<Store>& store, int rank, int size,
                         const std::string& prefix = "unisono") {
  return {.rank = rank, .size = size, .store = store, .timeout = 60s, .start_timeout = 60s, .prefix = prefix};
}

/// The sum over ranks of `value`.
float sum(ProcessGroup& group, float value) {
  group.all_reduce({.data = &value, .count = 1, .dtype = Dtype::f32}).wait();
  return value;
}

/// Poisons the group everywhere, and waits until this rank knows.
void fail(ProcessGroup& group) {
  group.abort(Error(ErrorCode::peer_lost, "as if a rank had died"));
  error_of([&] { group.barrier().wait(); }, ErrorCode::peer_lost);
}

TEST(Regroup, TheSamePrefixServesOneGroupAfterTheOther) {
  const auto store = std::make_shared<MemoryStore>();
  on_threads(3, [&](int rank) {
    for (int i = 0; i < 5; ++i) {
      const auto group = make_group("shm", options_for(store, rank, 3));
      EXPECT_EQ(sum(*group, static_cast<float>(rank + i)), static_cast<float>(3 + 3 * i));
      if (i == 2) fail(*group);
    }
  });
}

TEST(Regroup, TheSamePrefixServesTwoGroupsAtOnce) {
  const auto store = std::make_shared<MemoryStore>();
  on_threads(2, [&](int rank) {
    const auto first = make_group("shm", options_for(store, rank, 2));
    const auto second = make_group("shm", options_for(store, rank, 2));
    for (int i = 0; i < 10; ++i) EXPECT_EQ(sum(i % 2 == 0 ? *first : *second, 1), 2);
  });
}

TEST(Regroup, ThoseThatStayKeepTheirOrder) {
  const auto store = std::make_shared<MemoryStore>();
  on_threads(5, [&](int rank) {
    auto group = make_group("shm", options_for(store, rank, 5));
    if (rank == 0 || rank == 3) return error_of([&] { group->barrier().wait(); }, ErrorCode::peer_lost), void();
    fail(*group);
    const auto rest = without(group, {3, 0, 3});
    EXPECT_EQ(rest->size(), 3);
    EXPECT_EQ(rest->rank(), rank == 4 ? 2 : rank - 1);
    EXPECT_EQ(rest->timeout(), 60s);
    group.reset();
    EXPECT_EQ(sum(*rest, static_cast<float>(rank)), 7);
    if (rank == 2) return;
    const auto two = without(rest, {1});  // and again
    EXPECT_EQ(sum(*two, static_cast<float>(rank)), 5);
    if (rank == 1) return;
    const auto alone = without(two, {0});
    EXPECT_EQ(alone->name(), "serial");
    EXPECT_EQ(sum(*without(alone, {}), 4), 4);
  });
}

TEST(Regroup, NobodyNeedsToGo) {
  const auto store = std::make_shared<MemoryStore>();
  on_threads(2, [&](int rank) {
    auto group = make_group("shm", options_for(store, rank, 2));
    for (int i = 0; i < 3; ++i) {
      fail(*group);
      group = without(group, {});
      EXPECT_EQ(sum(*group, static_cast<float>(rank)), 1);
    }
  });
}

TEST(Regroup, RanksThatLeaveOutOthersAreNamedAndMayTryAgain) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<std::string> texts(4);
  on_threads(4, [&](int rank) {
    const auto group = make_group("shm", options_for(store, rank, 4));
    if (rank == 3) return error_of([&] { group->barrier().wait(); }, ErrorCode::peer_lost), void();
    fail(*group);
    texts[static_cast<std::size_t>(rank)] =
        error_of([&] { without(group, rank == 1 ? std::vector{0, 3} : std::vector{3}, 30s); }, ErrorCode::mismatch);
    const auto rest = without(group, {3});
    EXPECT_EQ(sum(*rest, static_cast<float>(rank)), 3);
  });
  for (const int rank : {0, 2}) {
    const std::string& text = texts[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(contains(text, "rank 1 leaves out [0, 3]")) << text;
    EXPECT_TRUE(contains(text, "rank " + std::to_string(rank) + " leaves out [3]")) << text;
  }
  EXPECT_TRUE(contains(texts[1], "leaves out [3] and rank 1 leaves out [0, 3]") ||
              contains(texts[1], "rank 1 leaves out [0, 3] and rank 2 leaves out [3]"))
      << texts[1];
}

TEST(Regroup, AMissingRankIsNamedAndMayBeLeftOutNext) {
  const auto store = std::make_shared<MemoryStore>();
  on_threads(3, [&](int rank) {
    const auto group = make_group("shm", options_for(store, rank, 3));
    if (rank > 0) return error_of([&] { group->barrier().wait(); }, ErrorCode::peer_lost), void();
    fail(*group);
    const std::string text = error_of([&] { without(group, {2}, 100ms); }, ErrorCode::timeout);
    EXPECT_TRUE(contains(text, "without [2]: missing rank [1] after 0.1")) << text;
    EXPECT_EQ(without(group, {1, 2})->size(), 1);
  });
}

// One is so late that the other has given up: both try again until they meet.
TEST(Regroup, ThoseWhoTryAgainMeet) {
  const auto store = std::make_shared<MemoryStore>();
  std::promise<void> gave_up;
  on_threads(2, [&](int rank) {
    const auto group = make_group("shm", options_for(store, rank, 2));
    if (rank == 0) {
      error_of([&] { without(group, {}, 50ms); }, ErrorCode::timeout);
      gave_up.set_value();
    } else {
      gave_up.get_future().wait();
    }
    EXPECT_EQ(sum(*without(group, {}, 30s), 1), 2);
    EXPECT_EQ(sum(*without(group, {}, 30s), 1), 2);  // and once more, where both have made one
  });
}

// A time that no clock can hold is none: it is not in the past.
TEST(Regroup, WithoutALimit) {
  const auto store = std::make_shared<MemoryStore>();
  on_threads(2, [&](int rank) {
    constexpr auto kNone = std::chrono::nanoseconds::max();
    GroupOptions options = options_for(store, rank, 2);
    options.timeout = options.start_timeout = kNone;
    const auto group = make_group("shm", options);
    EXPECT_EQ(sum(*group, 1), 2);
    EXPECT_EQ(sum(*without(group, {}, kNone), 1), 2);
  });
}

TEST(Regroup, WrongRanksAreRefused) {
  const auto store = std::make_shared<MemoryStore>();
  on_threads(2, [&](int rank) {
    const auto group = make_group("shm", options_for(store, rank, 2));
    const auto refused = [&](int leaver) {
      return error_of([&] { without(group, {leaver}); }, ErrorCode::invalid_argument);
    };
    EXPECT_TRUE(contains(refused(2), "there is no rank 2; ranks are 0 to 1"));
    EXPECT_TRUE(contains(refused(-1), "there is no rank -1"));
    EXPECT_TRUE(contains(refused(rank), "this rank itself is to go"));
    EXPECT_EQ(sum(*group, 1), 2);
  });
  FakeWorld world(2);
  EXPECT_TRUE(contains(error_of([&] { without(world.group(0), {1}); }, ErrorCode::invalid_argument), "no store"));
  EXPECT_EQ(store_of(*world.group(0)), nullptr);
}

TEST(Regroup, ARoundRobinLosesARankInEachOfItsGroups) {
  const auto store = std::make_shared<MemoryStore>();
  on_threads(3, [&](int rank) {
    std::vector<GroupPtr> all;
    for (int g = 0; g < 2; ++g) all.push_back(make_group("shm", options_for(store, rank, 3, std::to_string(g))));
    const auto group = make_round_robin_group(all);
    EXPECT_EQ(sum(*group, 1), 3);
    if (rank == 1) return error_of([&] { group->barrier().wait(); }, ErrorCode::peer_lost), void();
    fail(*group);
    const auto rest = without(group, {1});
    EXPECT_EQ(rest->name(), "round-robin(shm, shm)");
    for (int i = 0; i < 4; ++i) EXPECT_EQ(sum(*rest, static_cast<float>(rank)), 2);
  });
}

// Two ranks work, a third comes, and all make a group of three on another prefix of the same store.
TEST(Regroup, AThirdRankJoins) {
  const auto store = std::make_shared<MemoryStore>();
  on_threads(3, [&](int rank) {
    if (rank < 2) {
      const auto pair = make_group("shm", options_for(store, rank, 2));
      EXPECT_EQ(sum(*pair, 1), 2);
      EXPECT_EQ(store_of(*pair), store);
    }
    const auto three = make_group("shm", options_for(store, rank, 3, "three"));
    EXPECT_EQ(sum(*three, 1), 3);
  });
}

const RegisterChild kSurvive("regroup-survive", [](const Arguments& a) {
  const int rank = std::stoi(a[1]);
  const auto group = make_group("shm", options_in(a[0], rank, std::stoi(a[2])));
  group->barrier().wait();
  if (rank == 0) raise(SIGKILL);
  try {
    for (;;) sum(*group, 1);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::peer_lost) throw;
  }
  const auto rest = without(group, {0});
  return rest->rank() == rank - 1 && sum(*rest, static_cast<float>(rank)) == 3 ? kAsExpected : 1;
});

TEST(Regroup, SurvivorsOfAKilledProcessGoOn) {
  const TemporaryFolder folder;
  std::vector<Child> children;
  for (int r = 0; r < 3; ++r) children.push_back(start_rank("regroup-survive", folder.path(), r, 3));
  EXPECT_EQ(children[0].wait(), 128 + SIGKILL);
  EXPECT_EQ(children[1].wait(), kAsExpected);
  EXPECT_EQ(children[2].wait(), kAsExpected);
}

}  // namespace
}  // namespace unisono::testing
