#include <gtest/gtest.h>
#include <unisono/round_robin.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/errors.h"
#include "comm/fake/fake_group.h"
#include "comm/round_robin/homes.h"
#include "comm/shm/shm_group.h"
#include "comm/test_store.h"

// What a round robin does beyond the contract: which group serves what, and how the groups fail together.

namespace unisono::testing {
namespace {

using Groups = std::vector<std::shared_ptr<ProcessGroup>>;

/// k fake worlds of two ranks and a round robin for each rank; one thread makes both ranks' calls.
struct Fakes {
  explicit Fakes(std::size_t k) {
    for (std::size_t g = 0; g < k; ++g) worlds.push_back(std::make_unique<FakeWorld>(2));
    for (int r = 0; r < 2; ++r) {
      Groups all;
      for (auto& world : worlds) all.push_back(world->group(r));
      ranks.push_back(make_round_robin_group(std::move(all)));
    }
  }
  std::vector<std::unique_ptr<FakeWorld>> worlds;
  Groups ranks;
};

Buffer floats(std::vector<float>& data) { return {.data = data.data(), .count = data.size(), .dtype = Dtype::f32}; }

TEST(RoundRobin, CallsTakeTurns) {
  Fakes fakes(3);
  for (auto& group : fakes.ranks) {
    for (std::int32_t i = 0; i < 7; ++i) group->barrier({.tag = {.bucket = i}});
  }
  for (std::size_t g = 0; g < 3; ++g) {
    for (int r = 0; r < 2; ++r) {
      const auto calls = fakes.worlds[g]->calls(r);
      ASSERT_EQ(calls.size(), g == 0 ? 3u : 2u);
      for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_EQ(calls[i].bucket, static_cast<int>(g + 3 * i));
    }
  }
}

TEST(RoundRobin, MemoryStaysWithTheGroupThatAllocatedIt) {
  Fakes fakes(3);
  for (auto& group : fakes.ranks) {
    std::vector<Buffer> memory;
    for (int i = 0; i < 4; ++i) memory.push_back(group->allocate(4096));
    for (std::int32_t i : {3, 2, 1, 0, 1}) {
      const Buffer& m = memory[static_cast<std::size_t>(i)];
      const Buffer part = {.data = static_cast<char*>(m.data) + 64, .count = 8, .owner = m.owner};
      group->all_reduce(part, AllReduceOptions{CallOptions{.tag = {.bucket = i}}});
    }
  }
  for (std::size_t g = 0; g < 3; ++g) {
    for (const FakeCall& call : fakes.worlds[g]->calls(1)) {
      EXPECT_EQ(static_cast<std::size_t>(call.bucket) % 3, g);
      EXPECT_EQ(call.allocation, call.bucket / 3);
      EXPECT_EQ(call.offset, 64u);
    }
  }
}

TEST(RoundRobin, OrdinaryMemoryInTheSamePlaceHasNoHome) {
  std::vector<float> data(8);
  auto owner = std::make_shared<int>();
  Homes homes;
  homes.add({.data = data.data(), .count = 32, .dtype = Dtype::u8, .owner = owner}, 1);
  EXPECT_EQ(homes.find(floats(data)), 1u);
  EXPECT_EQ(homes.find({.data = data.data() + 1, .count = 8}), std::nullopt) << "only a part of it lies inside";
  EXPECT_EQ(homes.find({.data = data.data(), .count = 0}), std::nullopt);
  owner.reset();
  EXPECT_EQ(homes.find(floats(data)), std::nullopt);
}

TEST(RoundRobin, MemoryThatWasGivenBackIsForgotten) {
  Fakes fakes(2);
  std::vector<float> own(8);
  for (auto& group : fakes.ranks) {
    for (int i = 0; i < 5; ++i) {  // the same address again and again, from another group
      const Buffer memory = group->allocate(4096);
      group->all_reduce({.data = memory.data, .count = 8, .owner = memory.owner});
    }
    group->all_reduce(floats(own));
  }
  // Numbers 0, 2, ..., 8 were allocations, so all of one group; call 10 takes its turn.
  EXPECT_EQ(fakes.worlds[0]->calls(0).size(), 6u);
  for (const FakeCall& call : fakes.worlds[0]->calls(0)) EXPECT_EQ(call.allocation < 0, call.sequence == 5);
}

TEST(RoundRobin, CallsEndInOrderAndThoseWithAPriorityWhenTheyHave) {
  Fakes fakes(2);
  fakes.worlds[0]->hold();
  std::vector<Work> works;
  for (auto& group : fakes.ranks) {
    works.push_back(group->barrier());
    works.push_back(group->barrier());
    group->barrier();
    works.push_back(group->barrier({.priority = 1}));
  }
  EXPECT_FALSE(works[0].poll());
  EXPECT_FALSE(works[1].poll()) << "its group is done, but the call before it is not";
  EXPECT_TRUE(works[2].poll());
  fakes.worlds[0]->release_all();
  EXPECT_TRUE(works[1].poll());
  EXPECT_TRUE(works[0].poll());
}

TEST(RoundRobin, AFailureIsFoundByACallOfAnotherGroup) {
  Fakes fakes(2);
  fakes.worlds[0]->fail_at(0, Error(ErrorCode::corrupt, "by the script"));
  fakes.ranks[0]->barrier();  // fails at once, and nobody waits for it
  const std::string text = error_of([&] { fakes.ranks[0]->barrier(); }, ErrorCode::corrupt);
  EXPECT_EQ(text, "round robin, group 0 of 2 (fake): by the script");
  EXPECT_EQ(error_of([&] { fakes.ranks[0]->allocate(64); }, ErrorCode::corrupt), text);
  EXPECT_EQ(error_of([&] { fakes.ranks[1]->barrier(); }, ErrorCode::corrupt), text);
  EXPECT_TRUE(contains(error_of([&] { fakes.worlds[1]->group(0)->barrier(); }, ErrorCode::corrupt), text));
}

TEST(RoundRobin, CallsUnderWayElsewhereFailWithTheCause) {
  Fakes fakes(2);
  fakes.worlds[0]->hold();
  fakes.ranks[0]->barrier();
  Work behind = fakes.ranks[0]->barrier();  // the other rank does not come
  fakes.worlds[0]->group(1)->abort(Error(ErrorCode::corrupt, "by the script"));
  error_of([&] { fakes.ranks[0]->barrier(); }, ErrorCode::corrupt);
  EXPECT_EQ(error_of([&] { behind.wait(); }, ErrorCode::corrupt), "round robin, group 0 of 2 (fake): by the script");
}

TEST(RoundRobin, AnAbortOfOneGroupPoisonsAll) {
  Fakes fakes(3);
  fakes.worlds[1]->group(0)->abort(Error(ErrorCode::peer_lost, "enough"));
  fakes.ranks[0]->barrier();
  const std::string text = error_of([&] { fakes.ranks[0]->barrier(); }, ErrorCode::peer_lost);
  EXPECT_EQ(text, "round robin, group 1 of 3 (fake): enough");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(error_of([&] { fakes.ranks[0]->barrier(); }, ErrorCode::peer_lost), text);
}

TEST(RoundRobin, WhatItIsMadeOfMustBeAlike) {
  FakeWorld two(2), three(3), other(2);
  const auto refused = [](Groups groups) {
    return error_of([&] { make_round_robin_group(groups); }, ErrorCode::invalid_argument);
  };
  EXPECT_TRUE(contains(refused({}), "no group was given"));
  EXPECT_TRUE(contains(refused({two.group(0), nullptr}), "group 1 is null"));
  EXPECT_TRUE(contains(refused({two.group(0), other.group(0), two.group(0)}), "group 2 was given before"));
  EXPECT_TRUE(contains(refused({two.group(0), three.group(0)}), "rank 0 of 2 in group 0 and rank 0 of 3 in group 1"));
  EXPECT_TRUE(contains(refused({two.group(0), other.group(1)}), "rank 0 of 2 in group 0 and rank 1 of 2 in group 1"));
  const auto made = make_round_robin_group({two.group(0), other.group(0)});
  EXPECT_EQ(made->name(), "round-robin(fake, fake)");
  EXPECT_EQ(groups_of_round_robin(*made).size(), 2u);
  EXPECT_TRUE(groups_of_round_robin(*two.group(0)).empty());
}

// Rank 0's data lies in memory of one group, rank 1's elsewhere: their calls go to different groups. The next call must
// not be taken for the one that is missing.
TEST(RoundRobin, RanksThatDifferInTheirMemoryAreToldAndNothingIsSummed) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<std::string> texts(2);
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      Groups all;
      for (int g = 0; g < 3; ++g)
        all.push_back(make_shm_group({.rank = r, .size = 2, .store = store, .prefix = std::to_string(g)}));
      const auto group = make_round_robin_group(std::move(all));
      const Buffer memory = group->allocate(4096);
      std::vector<float> elsewhere(8, 1.0f);
      texts[static_cast<std::size_t>(r)] = error_of(
          [&] {
            Work first = group->all_reduce(r == 0 ? Buffer{.data = memory.data, .count = 8} : floats(elsewhere));
            Work second = group->all_reduce({.data = memory.data, .count = 8});
            second.wait();
          },
          ErrorCode::mismatch);
      EXPECT_EQ(elsewhere, std::vector<float>(8, 1.0f));
    });
  }
  for (auto& t : ranks) t.join();
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_TRUE(contains(texts[0], "turn 1") && contains(texts[0], "turn 2")) << texts[0];
}

}  // namespace
}  // namespace unisono::testing
