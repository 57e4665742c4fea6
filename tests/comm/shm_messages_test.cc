#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "comm/contract.h"
#include "comm/point_to_point.h"
#include "comm/shm/mail.h"
#include "comm/shm/shm_group.h"

// Messages between two ranks. Ranks are threads.

namespace unisono::testing {
namespace {

const Transport kShm = {.name = "shm", .world = [](int, std::chrono::nanoseconds) -> Maker {
                          return [](const GroupOptions& o) { return make_shm_group(o); };
                        }};

PointToPoint& messages(ProcessGroup& group) { return dynamic_cast<PointToPoint&>(group); }

Buffer ints(std::vector<std::int32_t>& v) { return {.data = v.data(), .count = v.size(), .dtype = Dtype::i32}; }

std::vector<std::int32_t> numbers(std::size_t n, int seed) {
  std::vector<std::int32_t> out(n);
  std::iota(out.begin(), out.end(), seed * 1'000'003);
  return out;
}

std::shared_ptr<Message> send(ProcessGroup& group, std::vector<std::int32_t>& v, int to, int tag = 0) {
  return messages(group).send(ints(v), to, tag, {});
}
std::shared_ptr<Message> receive(ProcessGroup& group, std::vector<std::int32_t>& v, int from, int tag = 0) {
  return messages(group).receive(ints(v), from, tag, {});
}
void wait(const std::shared_ptr<Message>& message) { Work(message).wait(); }

constexpr std::size_t kSizes[] = {0, 1, 3, 16, 17, 1000, 65'536 - 16, 65'536, 65'537, 300'001};

TEST(ShmMessages, OfAllSizesArriveInOrder) {
  run_ranks(kShm, 2, [](ProcessGroup& group) {
    for (int round = 0; round < 3; ++round) {
      for (const std::size_t n : kSizes) {
        auto data = numbers(n, round);
        if (group.rank() == 0) {
          wait(send(group, data, 1));
        } else {
          std::vector<std::int32_t> got(n);
          const auto message = receive(group, got, 0);
          wait(message);
          require(got == data, "size " + std::to_string(n));
          require(message->peer() == 0, "peer");
        }
      }
    }
  });
}

// Both sides send more than a lane holds before they receive.
TEST(ShmMessages, BothWaysAtOnce) {
  run_ranks(kShm, 4, [](ProcessGroup& group) {
    constexpr std::size_t kCount = 200'000;
    std::vector<std::vector<std::int32_t>> out, in(4, std::vector<std::int32_t>(kCount));
    for (int r = 0; r < 4; ++r) out.push_back(numbers(kCount, group.rank() * 4 + r));
    std::vector<std::shared_ptr<Message>> all;
    for (int r = 0; r < 4; ++r)
      if (r != group.rank()) all.push_back(send(group, out[static_cast<std::size_t>(r)], r));
    for (int r = 0; r < 4; ++r)
      if (r != group.rank()) all.push_back(receive(group, in[static_cast<std::size_t>(r)], r));
    for (const auto& message : all) wait(message);
    for (int r = 0; r < 4; ++r)
      if (r != group.rank())
        require(in[static_cast<std::size_t>(r)] == numbers(kCount, r * 4 + group.rank()), "content");
  });
}

TEST(ShmMessages, TagsMayBeReceivedInAnyOrder) {
  run_ranks(kShm, 2, [](ProcessGroup& group) {
    std::vector<int> tags(20);
    std::iota(tags.begin(), tags.end(), 0);
    std::shuffle(tags.begin(), tags.end(), std::mt19937(static_cast<unsigned>(5 + group.rank())));
    std::vector<std::vector<std::int32_t>> data(20);
    std::vector<std::shared_ptr<Message>> all;
    for (const int tag : tags) {
      auto& mine = data[static_cast<std::size_t>(tag)];
      mine = numbers(static_cast<std::size_t>(tag) * 5'000, tag);
      if (group.rank() == 0) {
        all.push_back(send(group, mine, 1, tag));
      } else {
        std::vector<std::int32_t> got(mine.size());
        wait(receive(group, got, 0, tag));
        require(got == mine, "tag " + std::to_string(tag));
      }
    }
    for (const auto& message : all) wait(message);
  });
}

TEST(ShmMessages, FromAnyRank) {
  run_ranks(kShm, 5, [](ProcessGroup& group) {
    if (group.rank() != 0) {
      for (int i = 0; i < 10; ++i) {
        auto data = numbers(100, group.rank() * 10 + i);
        wait(send(group, data, 0));
      }
      return;
    }
    std::vector<int> seen(5, 0);
    for (int i = 0; i < 40; ++i) {
      std::vector<std::int32_t> got(100);
      const auto message = receive(group, got, PointToPoint::kAnyRank);
      wait(message);
      const int from = message->peer();
      require(got == numbers(100, from * 10 + seen[static_cast<std::size_t>(from)]++), "content");
    }
    require(seen == std::vector<int>({0, 10, 10, 10, 10}), "ten of each");
  });
}

// Nobody waits for the message; it arrives all the same, and so do collectives beside it.
TEST(ShmMessages, ArriveWhileNobodyWaits) {
  run_ranks(kShm, 2, [](ProcessGroup& group) {
    std::vector<std::int32_t> data = numbers(400'000, 1), got(400'000);
    const auto message = group.rank() == 0 ? send(group, data, 1) : receive(group, got, 0);
    for (int i = 0; i < 20; ++i) group.barrier().wait();
    while (!dynamic_cast<shm::Mail&>(*message).has_ended()) std::this_thread::yield();
    if (group.rank() == 1) require(got == data, "content");
  });
}

TEST(ShmMessages, RandomTraffic) {
  for (unsigned seed = 0; seed < (kSanitized ? 3u : 12u); ++seed) {
    run_ranks(kShm, 4, [seed](ProcessGroup& group) {
      struct Plan {
        int from, to, tag;
        std::size_t count;
      };
      std::mt19937 random(seed);
      std::vector<Plan> plan;
      for (int i = 0; i < 200; ++i) {
        const int from = static_cast<int>(random() % 4);
        plan.push_back({from, (from + 1 + static_cast<int>(random() % 3)) % 4, static_cast<int>(random() % 3),
                        random() % (random() % 10 == 0 ? 120'000 : 300)});
      }
      std::vector<std::vector<std::int32_t>> data(plan.size());
      std::vector<std::shared_ptr<Message>> all(plan.size());
      for (std::size_t i = 0; i < plan.size(); ++i) {
        const Plan& p = plan[i];
        if (p.from == group.rank()) {
          data[i] = numbers(p.count, static_cast<int>(i));
          all[i] = send(group, data[i], p.to, p.tag);
        } else if (p.to == group.rank()) {
          data[i].resize(p.count);
          all[i] = receive(group, data[i], p.from, p.tag);
        }
      }
      for (std::size_t i = plan.size(); i-- > 0;)
        if (all[i]) wait(all[i]);
      for (std::size_t i = 0; i < plan.size(); ++i)
        if (plan[i].to == group.rank())
          require(data[i] == numbers(plan[i].count, static_cast<int>(i)), "message " + std::to_string(i));
    });
  }
}

TEST(ShmMessages, OfAnotherSizeNameBothSides) {
  run_ranks(kShm, 2, [](ProcessGroup& group) {
    std::vector<std::int32_t> data(group.rank() == 0 ? 5 : 6);
    const auto failure = failure_of([&] {
      wait(group.rank() == 0 ? send(group, data, 1, 3) : receive(group, data, 0, 3));
      wait(group.rank() == 0 ? receive(group, data, 1) : send(group, data, 0));
    });
    require(failure && failure->code == ErrorCode::mismatch, "a mismatch");
    require(failure->text.find("rank 1, receive of 6 i32 from rank 0, tag 3: rank 0 sent 5 i32") != std::string::npos,
            failure->text);
    require(failure_of([&] { group.barrier().wait(); }).has_value(), "the group is poisoned");
  });
}

TEST(ShmMessages, ThatNeverComeEndAtTheirDeadline) {
  run_ranks(kShm, 2, [](ProcessGroup& group) {
    std::vector<std::int32_t> data(5);
    if (group.rank() == 0) {
      const auto failure =
          failure_of([&] { Work(messages(group).receive(ints(data), 1, 4, std::chrono::milliseconds(80))).wait(); });
      require(failure && failure->code == ErrorCode::timeout, "a timeout");
      require(
          failure->text.find("receive of 5 i32 from rank 1, tag 4: no such message came within") != std::string::npos,
          failure->text);
    } else {  // waits for longer, and learns of it
      const auto failure = failure_of([&] { wait(receive(group, data, 0)); });
      require(failure && failure->text.find("tag 4") != std::string::npos, "the first cause");
    }
  });
}

// What was sent before its sender left can still be received; what was not is an error that says so.
TEST(ShmMessages, OfARankThatLeft) {
  std::vector<std::int32_t> expected = numbers(1000, 3);
  std::atomic<bool> left{false};
  run_ranks(kShm, 2, 2, [&](const std::vector<std::shared_ptr<ProcessGroup>>& groups) {
    auto data = expected;
    if (groups[0]->rank() == 0) {
      wait(send(*groups[0], data, 1));
      const_cast<std::shared_ptr<ProcessGroup>&>(groups[0]).reset();
      left = true;
      return;
    }
    while (!left) std::this_thread::yield();
    std::vector<std::int32_t> got(1000);
    wait(receive(*groups[0], got, 0));
    require(got == expected, "content");
    const auto failure = failure_of([&] { wait(receive(*groups[0], got, 0)); });
    require(
        failure && failure->code == ErrorCode::peer_lost && failure->text.find("left the group") != std::string::npos,
        failure ? failure->text : "no error");
  });
}

TEST(ShmMessages, BadArguments) {
  run_ranks(kShm, 2, [](ProcessGroup& group) {
    std::vector<std::int32_t> data(5);
    for (const int peer : {group.rank(), -1, 2}) {
      const auto failure = failure_of([&] { send(group, data, peer); });
      require(failure && failure->code == ErrorCode::invalid_argument, "peer " + std::to_string(peer));
    }
    group.barrier().wait();
  });
}

}  // namespace
}  // namespace unisono::testing
