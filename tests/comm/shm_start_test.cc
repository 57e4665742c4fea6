#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <future>
#include <set>

#include "comm/errors.h"
#include "comm/shm_children.h"
#include "comm/shm_ranks.h"

// How a group starts, or does not, and what it leaves behind.

namespace unisono::testing {
namespace {

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

std::size_t count_entries(const std::string& folder) { return names_in(folder).size(); }

std::size_t count_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  std::size_t count = 0;
  while (std::getline(maps, line)) count += contains(line, "memfd:unisono");
  return count;
}

TEST(ShmStart, NamesTheMissingRank) {
  TemporaryFolder folder;
  GroupOptions options = options_in(folder.path(), 0, 3);
  options.start_timeout = std::chrono::milliseconds(200);
  const std::string text = error_of([&] { make_shm_group(options); }, ErrorCode::timeout);
  EXPECT_TRUE(contains(text, "missing ranks 1, 2")) << text;
}

TEST(ShmStart, RankClaimedTwiceNamesBothProcessesEverywhere) {
  TemporaryFolder folder;
  auto first = std::async(std::launch::async, [&] {
    return error_of([&] { make_shm_group(options_in(folder.path(), 0, 2)); }, ErrorCode::invalid_argument);
  });
  FolderStore store(folder.path());
  while (!store.get("unisono/round/1/rank/0", std::chrono::seconds(1))) {
  }
  Child second = start_rank("shm-start-only", folder.path(), 0, 2);
  const std::string here = first.get();
  const std::string second_pid = "pid " + std::to_string(second.pid());
  EXPECT_EQ(second.wait(), kAsExpected);
  const std::string there = store.get("error", std::chrono::seconds(1)).value_or("none");
  for (const auto& text : {here, there}) {
    EXPECT_TRUE(contains(text, "rank 0 of 2 is claimed by pid " + std::to_string(getpid()))) << text;
    EXPECT_TRUE(contains(text, "and by " + second_pid)) << text;
  }
}

TEST(ShmStart, TooSmallFilesAreAnErrorOnEveryRank) {
  TemporaryFolder folder;
  Child peer = start_rank("shm-small-files", folder.path(), 1, 2);
  const std::string text =
      error_of([&] { make_shm_group(options_in(folder.path(), 0, 2)); }, ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(text, "rank 1")) << text;
  EXPECT_TRUE(contains(text, "RLIMIT_FSIZE")) << text;
  EXPECT_EQ(peer.wait(), kAsExpected);
}

TEST(ShmStart, AnAllocationThatDoesNotFitIsRefusedAlikeAndHarmsNothing) {
  TemporaryFolder folder;
  Child peer = start_rank("shm-small-allocation", folder.path(), 1, 2);
  auto group = make_shm_group(options_in(folder.path(), 0, 2));
  const std::string here = error_of([&] { group->allocate(kLargeBytes); }, ErrorCode::invalid_argument);
  group->barrier().wait();
  EXPECT_EQ(peer.wait(), kAsExpected);
  const std::string there = FolderStore(folder.path()).get("error", std::chrono::seconds(1)).value_or("none");
  EXPECT_EQ(here, there);
  EXPECT_TRUE(contains(here, "on rank 1, this process's RLIMIT_FSIZE (ulimit -f) leaves room for 1048576 bytes"))
      << here;
}

TEST(ShmStart, AWorldOfOneNeedsNoStoreAndOthersAreToldSo) {
  make_group("shm", {})->barrier().wait();
  const std::string text = error_of([] { make_group("shm", {.rank = 0, .size = 2}); }, ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(text, "needs a store")) << text;
}

TEST(ShmStart, TheFactorySaysWhatItCannotServe) {
  const auto text_of = [](const std::string& transport, const GroupOptions& options) {
    return error_of([&] { make_group(transport, options); }, ErrorCode::invalid_argument);
  };
  EXPECT_TRUE(
      contains(text_of("carrier-pigeon", {}), "unknown transport 'carrier-pigeon'; this build has auto, serial, shm"));
  EXPECT_TRUE(contains(text_of("auto", {.rank = 2, .size = 2}), "the rank must be 0 to 1"));
  EXPECT_TRUE(contains(text_of("serial", {.rank = 0, .size = 2}), "a world of one, not of 2 ranks"));
  EXPECT_TRUE(
      contains(text_of("shm", {.rank = 0, .size = 65, .store = std::make_shared<MemoryStore>()}), "at most 64 ranks"));
  for (const auto& transport : viable_transports({})) {
    EXPECT_EQ(transport.viable, transport.reason.empty());
    if (transport.transport != "mpi") EXPECT_TRUE(transport.viable) << transport.reason;
  }
  EXPECT_TRUE(contains(text_of("gloo", {}), "this program was built without it"));
  EXPECT_EQ(make_group("auto", {})->name(), "serial");
}

TEST(ShmStart, ImpossibleSizeIsRefused) {
  auto group = make_shm_group({});
  const std::string text = error_of([&] { group->allocate(std::size_t{1} << 50); }, ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(text, "leaves room for")) << text;
}

// Twenty jobs on one store, each killed in the middle: each starts past the keys of those before, and nothing is left.
// One of two ranks that are threads gives up: the other must not look for its memory where it was.
TEST(ShmStart, AThreadThatGivesUpIsAnErrorOfTheOther) {
  for (int round = 0; round < 20; ++round) {
    const auto store = std::make_shared<MemoryStore>();
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        GroupOptions options{.rank = rank, .size = 2, .store = store, .timeout = std::chrono::seconds(60)};
        options.start_timeout =
            rank == 0 ? std::chrono::nanoseconds(1) : std::chrono::nanoseconds(std::chrono::seconds(2));
        try {
          make_shm_group(options);
        } catch (const Error&) {
        }
      });
    }
    for (auto& rank : ranks) rank.join();
  }
}

TEST(ShmStart, KilledJobsLeaveNothing) {
  TemporaryFolder folder;
  FolderStore store(folder.path());
  const auto before = names_in("/dev/shm");
  for (int job = 1; job <= 20; ++job) {
    Child zero = start_rank("shm-reduce-for-ever", folder.path(), 0, 2);
    Child one = start_rank("shm-reduce-for-ever", folder.path(), 1, 2);
    while (store.add("running", 0) < 2 * job) std::this_thread::yield();
    zero.signal(SIGKILL);
    one.signal(SIGKILL);
    EXPECT_EQ(zero.wait(), 128 + SIGKILL);
    EXPECT_EQ(one.wait(), 128 + SIGKILL);
  }
  EXPECT_EQ(names_in("/dev/shm"), before);
}

TEST(ShmStart, AllocationsAreGivenBack) {
  auto store = std::make_shared<MemoryStore>();
  std::vector<std::size_t> fds(2);
  std::vector<std::size_t> mappings(2);
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      auto group = make_shm_group({.rank = r, .size = 2, .store = store});
      for (int i = 0; i < 10'000; ++i) {
        group->allocate(100);
        if (i != 0 && i != 9'999) continue;
        group->barrier().wait();
        if (r == 0) fds[i > 0] = count_entries("/proc/self/fd");
        if (r == 0) mappings[i > 0] = count_mappings();
        group->barrier().wait();
      }
    });
  }
  for (auto& t : ranks) t.join();
  EXPECT_EQ(fds[0], fds[1]);
  EXPECT_EQ(mappings[0], mappings[1]);
  EXPECT_EQ(count_mappings(), 0u);
}

}  // namespace
}  // namespace unisono::testing
