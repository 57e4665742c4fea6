#include <gtest/gtest.h>

#include <thread>

#include "comm/contract.h"
#include "comm/fake/fake_group.h"

// The script of the fake world: one thread plays all ranks.

namespace unisono::testing {
namespace {

struct Two {
  FakeWorld world{2};
  std::shared_ptr<ProcessGroup> a = world.group(0), b = world.group(1);
  float x = 1, y = 2;

  static Buffer one(float& v) { return {.data = &v, .count = 1}; }
  std::pair<Work, Work> all_reduce() { return {a->all_reduce(one(x)), b->all_reduce(one(y))}; }
};

TEST(FakeScript, OneThreadPlaysAllRanks) {
  Two t;
  Work first = t.a->all_reduce(Two::one(t.x));
  EXPECT_FALSE(first.poll());
  Work second = t.b->all_reduce(Two::one(t.y));
  EXPECT_TRUE(first.poll());
  second.wait();
  EXPECT_EQ(3, t.x);
  EXPECT_EQ(3, t.y);
}

TEST(FakeScript, HeldCallsEndInTheOrderOfTheirRelease) {
  Two t;
  t.world.hold();
  auto [a0, b0] = t.all_reduce();
  Work a1 = t.a->barrier(), b1 = t.b->barrier();
  EXPECT_FALSE(a0.poll());
  EXPECT_EQ(1, t.x) << "a held call moves no data";
  t.world.release(2);  // not made yet
  Work a2 = t.a->barrier(), b2 = t.b->barrier();
  EXPECT_TRUE(a2.poll());
  t.world.release(1);
  EXPECT_TRUE(b1.poll());
  EXPECT_FALSE(b0.poll());
  t.world.release_all();
  EXPECT_TRUE(b0.poll());
  EXPECT_EQ(3, t.x);
  EXPECT_EQ((std::vector<std::int64_t>{2, 1, 0}), t.world.ended());
}

TEST(FakeScript, AReleaseWakesTheOneWhoWaits) {
  Two t;
  t.world.hold();
  std::thread rank0([&] { t.a->all_reduce(Two::one(t.x)).wait(); });
  std::thread rank1([&] { t.b->all_reduce(Two::one(t.y)).wait(); });
  t.world.wait_until_made(0);
  EXPECT_TRUE(t.world.ended().empty());
  t.world.release(0);
  rank0.join();
  rank1.join();
  EXPECT_EQ(3, t.x);
}

TEST(FakeScript, TheChosenCallFails) {
  Two t;
  t.world.fail_at(1, Error(ErrorCode::corrupt, "scripted"));
  auto [a0, b0] = t.all_reduce();
  a0.wait();
  b0.wait();
  Work a1 = t.a->barrier();
  const auto failure = failure_of([&] { a1.wait(); });
  ASSERT_TRUE(failure);
  EXPECT_EQ(ErrorCode::corrupt, failure->code);
  EXPECT_EQ("scripted", failure->text);
  EXPECT_EQ("scripted", failure_of([&] { t.b->barrier(); }).value_or(Failure{}).text);
  EXPECT_EQ(nullptr, a0.error()) << "a call that ended well stays so";
}

TEST(FakeScript, ALostRankFailsWhatItHasNotMade) {
  Two t;
  Work made = t.b->barrier();
  t.world.lose(1);
  t.a->barrier().wait();  // rank 1 had made it
  Work alone = t.a->all_reduce(Two::one(t.x));
  const auto failure = failure_of([&] { alone.wait(); });
  ASSERT_TRUE(failure);
  EXPECT_EQ(ErrorCode::peer_lost, failure->code);
  EXPECT_NE(std::string::npos, failure->text.find("rank 1")) << failure->text;
  EXPECT_NE(std::string::npos, failure->text.find("barrier")) << "its last call: " << failure->text;
}

TEST(FakeScript, CallsAreRecorded) {
  Two t;
  const Buffer memory = t.a->allocate(4096);
  t.b->allocate(4096);
  AllReduceOptions options;
  options.op = ReduceOp::max;
  options.tag = {.step = 4, .bucket = 2, .what = "gradients"};
  options.control.words = {5, 6};
  options.withhold = true;
  t.a->all_reduce({.data = static_cast<char*>(memory.data) + 128, .count = 10}, options);
  t.a->broadcast(Two::one(t.x), 1);
  const auto calls = t.world.calls(0);
  ASSERT_EQ(2u, calls.size());
  const FakeCall& c = calls[0];
  EXPECT_EQ("all_reduce", c.operation);
  EXPECT_EQ(10u, c.count);
  EXPECT_EQ(ReduceOp::max, c.op);
  EXPECT_EQ(4, c.step);
  EXPECT_EQ(2, c.bucket);
  EXPECT_EQ("gradients", c.what);
  EXPECT_EQ((std::vector<std::uint64_t>{5, 6}), c.control.words);
  EXPECT_TRUE(c.withhold);
  EXPECT_EQ(0, c.allocation);
  EXPECT_EQ(128u, c.offset);
  EXPECT_EQ("broadcast", calls[1].operation);
  EXPECT_EQ(1, calls[1].root);
  EXPECT_EQ(1, calls[1].sequence);
  EXPECT_EQ(-1, calls[1].allocation);
  EXPECT_TRUE(t.world.calls(1).empty());
}

TEST(FakeScript, WaitingForCallsNamesWhoHasNotMadeThem) {
  FakeWorld world(2, std::chrono::milliseconds(50));
  world.group(0)->barrier();
  const auto failure = failure_of([&] { world.wait_until_made(0); });
  ASSERT_TRUE(failure);
  EXPECT_EQ(ErrorCode::timeout, failure->code);
  EXPECT_NE(std::string::npos, failure->text.find("rank 1")) << failure->text;
}

}  // namespace
}  // namespace unisono::testing
