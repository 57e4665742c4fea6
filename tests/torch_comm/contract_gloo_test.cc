#include <unisono/c10d.h>
#include <unisono/make_group.h>

#include <cstdlib>
#include <future>
#include <iostream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/c10d/engines/gloo.h"
#include "comm/contract.h"
#include "comm/errors.h"
#include "comm/rendezvous.h"
#include "comm/test_store.h"

// Gloo as a C++ program makes it.

namespace unisono::testing {
namespace {

using std::chrono::milliseconds;

/// Its value is back when this goes.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    setenv(name, value, 1);
  }
  ~Variable() { old_ ? setenv(name_, old_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

const Transport kGloo = {
    .name = "gloo",
    .max_ranks = 3,
    .world = [](int, std::chrono::nanoseconds) -> Maker {
      setenv("GLOO_SOCKET_IFNAME", "lo", 0);
      return [](const GroupOptions& options) { return make_group("gloo", options); };
    },
    .processes = true,
    .numbers = Numbers::small,
};

std::vector<Transport> where_built() {
  if (why_no_gloo().empty()) return {kGloo};
  std::cout << "the contract over gloo is left out: " << why_no_gloo() << '\n';
  return {};
}

INSTANTIATE_TEST_SUITE_P(Gloo, Contract, ::testing::ValuesIn(where_built()));
[[maybe_unused]] const bool kRegistered = [] {
  register_for_processes(kGloo);
  return true;
}();

class Gloo : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_gloo().empty()) GTEST_SKIP() << why_no_gloo();
  }
  Variable interface_{"GLOO_SOCKET_IFNAME", "lo"};
};

float sum_over(const GroupOptions& options) {
  float value = static_cast<float>(options.rank + 1);
  make_group("gloo", options)->all_reduce({.data = &value, .count = 1, .dtype = Dtype::f32}).wait();
  return value;
}

TEST_F(Gloo, MeetsInAStoreOfTorchToo) {
  const auto store = make_store(c10::make_intrusive<c10d::HashStore>());
  for (int round = 0; round < 2; ++round) {  // the same ranks may use a prefix again
    auto other = std::async(std::launch::async, [&] { return sum_over({.rank = 1, .size = 2, .store = store}); });
    EXPECT_EQ(sum_over({.rank = 0, .size = 2, .store = store}), 3);
    EXPECT_EQ(other.get(), 3);
  }
}

TEST_F(Gloo, AutomaticallyOnlyWhereSharedMemoryCannot) {
  const GroupOptions two{.size = 2, .store = std::make_shared<MemoryStore>()}, many{.size = 65, .store = two.store};
  const auto first_of = [](const GroupOptions& options) {
    for (const auto& candidate : viable_transports(options))
      if (candidate.viable) return candidate.transport;
    return std::string();
  };
  EXPECT_EQ(first_of(two), "shm");
  EXPECT_EQ(first_of(many), "gloo");
  EXPECT_EQ(make_group("gloo", {})->name(), "serial");  // a world of one
}

TEST_F(Gloo, WhatIsMissingIsNamed) {
  const auto text_of = [](const GroupOptions& options, ErrorCode code) {
    return error_of([&] { make_group("gloo", options); }, code);
  };
  EXPECT_TRUE(contains(text_of({.size = 2}, ErrorCode::invalid_argument), "GroupOptions::store"));
  const auto alone = text_of({.size = 2, .store = std::make_shared<MemoryStore>(), .start_timeout = milliseconds(100)},
                             ErrorCode::timeout);
  EXPECT_TRUE(contains(alone, "missing rank 1")) << alone;
}

TEST_F(Gloo, AnInterfaceThatIsNotThereIsNamed) {
  const Variable interface("GLOO_SOCKET_IFNAME", "no-such-interface");
  const auto store = std::make_shared<MemoryStore>();
  const auto text_of = [&](int rank) {
    return error_of(
        [&] {
          make_group("gloo", {.rank = rank, .size = 2, .store = store, .start_timeout = std::chrono::seconds(20)});
        },
        ErrorCode::invalid_argument);
  };
  auto other = std::async(std::launch::async, text_of, 1);
  const std::string text = text_of(0);
  EXPECT_TRUE(contains(text, "GLOO_SOCKET_IFNAME=no-such-interface") && contains(text, "rank 0 of 2")) << text;
  EXPECT_TRUE(contains(other.get(), "rank 1 of 2"));
}

TEST_F(Gloo, ARankThatMeetsAndDoesNotStartIsADeadline) {
  const auto store = std::make_shared<MemoryStore>();
  const std::chrono::nanoseconds limit = std::chrono::seconds(2);
  auto other = std::async(std::launch::async, [&] { return join_round(*store, 1, 2, "unisono", limit); });
  const auto begin = std::chrono::steady_clock::now();
  const std::string text =
      error_of([&] { make_group("gloo", {.size = 2, .store = store, .start_timeout = limit}); }, ErrorCode::timeout);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 2 * limit + std::chrono::seconds(10));
  EXPECT_TRUE(contains(text, "rank 0 of 2") && contains(text, "GLOO_SOCKET_IFNAME")) << text;
  other.get();
}

TEST_F(Gloo, CallsKeepTheGroupsTimeoutNotThatOfTheStart) {
  const auto store = std::make_shared<MemoryStore>();
  const auto make = [&](int rank) {
    return make_group("gloo", {.rank = rank,
                               .size = 2,
                               .store = store,
                               .timeout = std::chrono::seconds(7),
                               .start_timeout = std::chrono::seconds(50)});
  };
  auto other = std::async(std::launch::async, make, 1);
  EXPECT_EQ(make(0)->timeout(), std::chrono::seconds(7));
  EXPECT_EQ(other.get()->timeout(), std::chrono::seconds(7));
}

TEST(NoGloo, SaysWhatToInstall) {
  if (why_no_gloo().empty()) GTEST_SKIP() << "this build has Gloo";
  const auto text = error_of([] { make_group("gloo", {.size = 2, .store = std::make_shared<MemoryStore>()}); },
                             ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(text, "libgloo-dev") && contains(text, "UNISONO_GLOO=ON")) << text;
}

// Whatever this machine has, NCCL is never chosen automatically, and says what it lacks.
TEST(Nccl, RefusesWithAReasonOrIsViable) {
  const GroupOptions options{.size = 2, .store = std::make_shared<MemoryStore>()};
  for (const auto& candidate : viable_transports(options)) {
    if (candidate.transport != "nccl") continue;
    if (candidate.viable) GTEST_SKIP() << "there is a GPU; tools/try_gpus.sh tries it";
    const auto text = error_of([&] { make_group("nccl", options); }, ErrorCode::invalid_argument);
    EXPECT_TRUE(contains(text, candidate.reason) && (contains(text, "UNISONO_NCCL=ON") || contains(text, "no GPU")))
        << text;
    return;
  }
  ADD_FAILURE() << "nccl is not in the table";
}

}  // namespace
}  // namespace unisono::testing
