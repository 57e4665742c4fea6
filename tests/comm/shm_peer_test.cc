#include <gtest/gtest.h>

#include <csignal>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "comm/shm_children.h"
#include "comm/shm_ranks.h"

// Peers that die, stop or leave, at every phase of a call. This process is rank 0; the others are shm_children.cc.

namespace unisono::testing {
namespace {

// The transport notices within 50 ms; this is for a busy machine.
constexpr std::int64_t kNoticed = 1'000'000'000;

struct Outcome {
  ErrorCode code = ErrorCode::internal;
  std::string text;
  std::int64_t took_ns = 0;
};

Outcome outcome_of(Work work, std::int64_t since) {
  Outcome out;
  try {
    work.wait();
    out.text = "no error";
  } catch (const Error& e) {
    out.code = e.code();
    out.text = e.what();
  }
  out.took_ns = now_ns() - since;
  return out;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Buffer floats(const Buffer& b) { return {.data = b.data, .count = b.count / 4, .dtype = Dtype::f32, .owner = b.owner}; }

void expect_lost(const Outcome& outcome, const Child& peer, int rank = 1) {
  EXPECT_EQ(outcome.code, ErrorCode::peer_lost) << outcome.text;
  EXPECT_TRUE(contains(outcome.text, "rank " + std::to_string(rank) + ", pid " + std::to_string(peer.pid())))
      << outcome.text;
  EXPECT_LT(outcome.took_ns, kNoticed);
  ::testing::Test::RecordProperty("noticed_us", static_cast<int>(outcome.took_ns / 1000));
}

TEST(ShmPeer, KilledBeforeItEnters) {
  TemporaryFolder folder;
  Child peer = start_rank("shm-idle", folder.path(), 1, 2);
  auto group = make_shm_group(options_in(folder.path(), 0, 2));
  group->barrier({.tag = {.step = 7, .what = "hello"}}).wait();
  std::vector<float> data(100);
  Work work = group->all_reduce({.data = data.data(), .count = 100, .dtype = Dtype::f32});
  EXPECT_FALSE(work.poll());
  peer.signal(SIGKILL);
  const Outcome outcome = outcome_of(work, now_ns());
  expect_lost(outcome, peer);
  EXPECT_TRUE(contains(outcome.text, "its last call was call 0, barrier(hello of step 7)")) << outcome.text;
  EXPECT_THROW(group->barrier(), Error);
}

TEST(ShmPeer, KilledWhileStagedDataMoves) {
  TemporaryFolder folder;
  Child peer = start_rank("shm-die-staged", folder.path(), 1, 2);
  auto group = make_shm_group(options_in(folder.path(), 0, 2));
  std::vector<float> data(kLargeBytes / 4);
  const std::int64_t begin = now_ns();
  expect_lost(outcome_of(group->all_reduce({.data = data.data(), .count = data.size(), .dtype = Dtype::f32}), begin),
              peer);
  EXPECT_NE(peer.wait(), 1);
}

TEST(ShmPeer, KilledWhileItReducesInPlace) {
  TemporaryFolder folder;
  Child peer = start_rank("shm-die-in-place", folder.path(), 1, 2);
  auto group = make_shm_group(options_in(folder.path(), 0, 2));
  Buffer memory = group->allocate(kSharedBytes);
  const std::int64_t begin = now_ns();
  expect_lost(outcome_of(group->all_reduce(floats(memory)), begin), peer);
  EXPECT_NE(peer.wait(), 1);
}

TEST(ShmPeer, EveryLivingRankSaysTheSame) {
  TemporaryFolder folder;
  Child peer = start_rank("shm-idle", folder.path(), 2, 3);
  std::vector<Outcome> outcomes(2);
  std::vector<std::thread> ranks;
  std::atomic<int> ready{0};
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      auto group = make_shm_group(options_in(folder.path(), r, 3));
      group->barrier({.tag = {.step = 7, .what = "hello"}}).wait();
      Work work = group->barrier();
      ready.fetch_add(1);
      while (ready.load() < 3) std::this_thread::yield();
      outcomes[static_cast<std::size_t>(r)] = outcome_of(work, now_ns());
    });
  }
  while (ready.load() < 2) std::this_thread::yield();
  peer.signal(SIGKILL);
  ready.fetch_add(1);
  for (auto& t : ranks) t.join();
  expect_lost(outcomes[0], peer, 2);
  EXPECT_EQ(outcomes[0].text, outcomes[1].text);
}

TEST(ShmPeer, LeavesTheGroup) {
  TemporaryFolder folder;
  Child peer = start_rank("shm-leave", folder.path(), 1, 2);
  auto group = make_shm_group(options_in(folder.path(), 0, 2));
  group->barrier().wait();
  const Outcome outcome = outcome_of(group->barrier(), now_ns());
  EXPECT_EQ(outcome.code, ErrorCode::peer_lost);
  EXPECT_TRUE(contains(outcome.text, "rank 1")) << outcome.text;
  EXPECT_EQ(peer.wait(), kAsExpected);
}

TEST(ShmPeer, StoppedBeforeItEnters) {
  TemporaryFolder folder;
  Child peer = start_rank("shm-idle", folder.path(), 1, 2);
  auto group = make_shm_group(options_in(folder.path(), 0, 2));
  group->barrier({.tag = {.step = 7, .what = "hello"}}).wait();
  peer.signal(SIGSTOP);
  const Outcome outcome = outcome_of(group->barrier({.timeout = std::chrono::milliseconds(200)}), now_ns());
  EXPECT_EQ(outcome.code, ErrorCode::timeout);
  EXPECT_TRUE(contains(outcome.text, "rank 1, pid " + std::to_string(peer.pid()))) << outcome.text;
  EXPECT_TRUE(contains(outcome.text, "has not entered barrier()")) << outcome.text;
}

// The hardest one: a peer that stops while it writes into our memory, and goes on when we have left.
TEST(ShmPeer, StoppedWhileItWritesIntoOurMemory) {
  TemporaryFolder folder;
  Child peer = start_rank("shm-stop-in-place", folder.path(), 1, 2);
  auto group = make_shm_group(options_in(folder.path(), 0, 2));
  Buffer memory = group->allocate(kSharedBytes);
  std::memset(memory.data, 0, kSharedBytes);
  AllReduceOptions options;
  options.timeout = std::chrono::milliseconds(500);
  const Outcome outcome = outcome_of(group->all_reduce(floats(memory), options), now_ns());
  EXPECT_EQ(outcome.code, ErrorCode::timeout) << outcome.text;
  EXPECT_TRUE(contains(outcome.text, "rank 1")) << outcome.text;
  std::memset(memory.data, 0x5a, kSharedBytes);
  peer.signal(SIGCONT);
  EXPECT_EQ(peer.wait(), kAsExpected);
  for (std::size_t i = 0; i < kSharedBytes; ++i) ASSERT_EQ(static_cast<char*>(memory.data)[i], 0x5a) << "byte " << i;
}

}  // namespace
}  // namespace unisono::testing
