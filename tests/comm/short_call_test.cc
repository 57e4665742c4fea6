#include "comm/issuer/short_call.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "comm/group_engine.h"
#include "comm/issuer/header_block.h"
#include "comm/issuer/issued_group.h"
#include "comm/test_store.h"

namespace unisono::testing {
namespace {

DataCall all_reduce_of(std::size_t bytes) {
  return {Operation::all_reduce, {.data = nullptr, .count = bytes, .dtype = Dtype::u8}};
}

TEST(ShortCalls, AreThoseOfWhichAllRanksTogetherGiveLittle) {
  const ShortCalls four(4);
  EXPECT_TRUE(four.is_short(all_reduce_of(16 << 10)));
  EXPECT_FALSE(four.is_short(all_reduce_of((16 << 10) + 1)));
  EXPECT_FALSE(four.is_short(all_reduce_of(0)));
  DataCall call = all_reduce_of(8);
  call.operation = Operation::all_to_all;
  EXPECT_FALSE(four.is_short(call));
  call = all_reduce_of(8);
  call.out.device.kind = Device::Kind::cuda;
  EXPECT_FALSE(four.is_short(call));
}

TEST(ShortCalls, RoomFollowsWhatWasNeededLately) {
  ShortCalls calls(2);
  EXPECT_EQ(calls.room(), 0u);
  calls.learn(4000);
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(calls.room(), 4000u);
    calls.learn(0);
  }
  calls.learn(0);
  EXPECT_EQ(calls.room(), 0u);
  calls.learn(1 << 20);
  EXPECT_EQ(calls.room(), 32u << 10);
}

CallHeader header_of(std::uint64_t count) {
  CallHeader header;
  header.operation = Operation::all_reduce;
  header.dtype = Dtype::u8;
  header.count = count;
  return header;
}

TEST(HeaderBlock, DataComesAlongWhereThereIsRoom) {
  const std::vector<std::byte> earlier(100, std::byte{1}), small(200, std::byte{2}), large(3000, std::byte{3});
  const std::vector<std::uint64_t> record{7, 8};
  for (const std::size_t room : {0, 3000}) {
    const std::size_t size = HeaderBlock::size_with({earlier.size()}, room);
    HeaderBlock block(5, size);
    block.follow(earlier.data(), earlier.size());
    CallHeader first = header_of(small.size()), second = header_of(large.size());
    first.words = 2;
    ASSERT_TRUE(block.add(first, record, small));
    ASSERT_TRUE(block.add(second, {}, large));
    EXPECT_EQ(block.bytes().size(), size);
    EXPECT_EQ(second.data_comes, room > 0);
    const auto read = HeaderBlock::read(block.bytes().data(), size, {earlier.size()});
    EXPECT_EQ(read.ended, 5);
    EXPECT_EQ(std::memcmp(read.followed[0], earlier.data(), earlier.size()), 0);
    ASSERT_EQ(read.headers.size(), 2u);
    EXPECT_EQ(read.records[0], record);
    EXPECT_EQ(std::memcmp(read.data[0], small.data(), small.size()), 0);
    ASSERT_EQ(read.data[1] != nullptr, room > 0);
    if (room > 0) {
      EXPECT_EQ(std::memcmp(read.data[1], large.data(), large.size()), 0);
    }
  }
}

TEST(HeaderBlock, WhatWasNotWrittenHereIsReadWithinItsBounds) {
  std::vector<std::uint8_t> garbage(HeaderBlock::kHeaders, 0xff);
  const auto read = HeaderBlock::read(garbage.data(), garbage.size(), {});
  EXPECT_LE(read.headers.size(), HeaderBlock::kHeaders / sizeof(CallHeader));
  for (const void* data : read.data) EXPECT_EQ(data, nullptr);

  for (const std::uint64_t count : {std::uint64_t{5000}, ~std::uint64_t{0}}) {  // data that the block has no room for
    HeaderBlock block(0, HeaderBlock::kHeaders);
    CallHeader header = header_of(8);
    const std::vector<std::byte> eight(8);
    ASSERT_TRUE(block.add(header, {}, eight));
    auto bytes = block.bytes();
    header.count = count;
    std::memcpy(bytes.data() + 16, &header, sizeof header);
    const auto told = HeaderBlock::read(bytes.data(), bytes.size(), {});
    ASSERT_EQ(told.data.size(), 1u);
    EXPECT_EQ(told.data[0], nullptr);
  }
}

// Counts what an engine is asked for.
class Counting final : public Engine {
 public:
  Counting(std::unique_ptr<Engine> inner, std::atomic<int>& starts, std::atomic<int>& gathers)
      : Engine(inner->info()), inner_(std::move(inner)), starts_(starts), gathers_(gathers) {}
  EngineOp start(const DataCall& call, Milliseconds timeout) override {
    ++starts_;
    return inner_->start(call, timeout);
  }
  EngineOp gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) override {
    ++gathers_;
    return inner_->gather_bytes(block, bytes, timeout);
  }
  void abort(const Error& cause) override { inner_->abort(cause); }

 private:
  std::unique_ptr<Engine> inner_;
  std::atomic<int>&starts_, &gathers_;
};

// Two ranks, one thread each; `body` gets the group and says nothing while others are at work.
void on_two_ranks(const std::function<void(ProcessGroup&, std::atomic<int>& starts, std::atomic<int>& gathers)>& body) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      std::atomic<int> starts = 0, gathers = 0;
      auto engine = make_group_engine(make_group("shm", {.rank = rank, .size = 2, .store = store}));
      IssuedGroup group(std::make_unique<Counting>(std::move(engine), starts, gathers));
      body(group, starts, gathers);
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST(ShortCalls, CostOneMessageOnceTheirSizeIsKnown) {
  on_two_ranks([](ProcessGroup& group, std::atomic<int>& starts, std::atomic<int>& gathers) {
    std::vector<float> data(1000);
    const auto reduce = [&] {
      std::fill(data.begin(), data.end(), static_cast<float>(group.rank() + 1));
      group.all_reduce({data.data(), data.size(), Dtype::f32}).wait();
      for (const float x : data) ASSERT_EQ(x, 3.0f);
    };
    reduce();
    EXPECT_EQ(gathers, 2);  // the header, then the data
    for (int call = 0; call < 3; ++call) reduce();
    EXPECT_EQ(gathers, 5);
    std::vector<float> all(20), own(10, static_cast<float>(group.rank()));
    group.all_gather({all.data(), 20, Dtype::f32}, {own.data(), 10, Dtype::f32}).wait();
    EXPECT_EQ(all[9], 0.0f);
    EXPECT_EQ(all[10], 1.0f);
    group.broadcast({own.data(), 10, Dtype::f32}, 1).wait();
    EXPECT_EQ(own[5], 1.0f);
    EXPECT_EQ(gathers, 7);
    EXPECT_EQ(starts, 0);
  });
}

TEST(ShortCalls, WithheldOnesLeaveTheDataAlone) {
  on_two_ranks([](ProcessGroup& group, std::atomic<int>&, std::atomic<int>& gathers) {
    for (int call = 0; call < 3; ++call) {
      float one = 1;
      AllReduceOptions options;
      options.withhold = call == 1 && group.rank() == 1;
      auto work = group.all_reduce({&one, 1, Dtype::f32}, options);
      work.wait();
      EXPECT_EQ(work.withheld(), call == 1);
      EXPECT_EQ(one, call == 1 ? 1.0f : 2.0f);
    }
    EXPECT_EQ(gathers, 3);  // a number fits beside any header
  });
}

// A barrier ends when the calls before it have, short ones too.
TEST(ShortCalls, AreEndedWhenABarrierAfterThemIs) {
  on_two_ranks([](ProcessGroup& group, std::atomic<int>&, std::atomic<int>&) {
    std::vector<float> data(4000);
    for (int round = 0; round < 50; ++round) {
      std::vector<Work> works;
      for (std::size_t length : {700, 1500, 300, 4000, 900})
        works.push_back(group.all_reduce({data.data(), length, Dtype::f32}));
      group.barrier().wait();
      for (Work& work : works) ASSERT_TRUE(work.poll());
    }
  });
}

// A record too large for the block and data behind it; many at once; a priority, which changes nothing.
TEST(ShortCalls, WithLargeRecordsAndInBursts) {
  on_two_ranks([](ProcessGroup& group, std::atomic<int>& starts, std::atomic<int>&) {
    std::vector<std::vector<double>> data(40, std::vector<double>(50, group.rank() + 0.5));
    std::vector<Work> works;
    for (std::size_t call = 0; call < data.size(); ++call) {
      AllReduceOptions options;
      options.control.words.assign(call % 5 == 0 ? 300 : 1, 1ull << group.rank());
      options.control.sums = {2.0};
      options.divide_by_sum = 0;
      options.priority = static_cast<int>(call % 3);
      works.push_back(group.all_reduce({data[call].data(), 50, Dtype::f64}, options));
    }
    for (std::size_t call = 0; call < data.size(); ++call) {
      works[call].wait();
      EXPECT_EQ(works[call].control().words[0], 3u);
      for (const double x : data[call]) ASSERT_EQ(x, 0.5);
    }
    EXPECT_EQ(starts, 0);
  });
}

// A program's object that owns the group and the memory it reduces, and is let go of while the call is under way: the
// issuer's own thread is the last that holds it.
struct Trainer : std::enable_shared_from_this<Trainer> {
  std::shared_ptr<ProcessGroup> group;
  std::vector<float> gradient = std::vector<float>(100'000, 1);
  std::promise<void>* gone = nullptr;
  ~Trainer() {
    group.reset();
    gone->set_value();
  }
};

TEST(IssuedGroup, MayBeLetGoOfByItsOwnThread) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<std::promise<void>> gone(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto trainer = std::make_shared<Trainer>();
      trainer->gone = &gone[static_cast<std::size_t>(rank)];
      trainer->group = std::make_shared<IssuedGroup>(
          make_group_engine(make_group("shm", {.rank = rank, .size = 2, .store = store})));
      ProcessGroup& group = *trainer->group;
      Buffer buffer{.data = trainer->gradient.data(), .count = trainer->gradient.size(), .owner = trainer};
      trainer.reset();
      group.all_reduce(std::move(buffer), {});
    });
  }
  for (auto& rank : ranks) rank.join();
  for (auto& end : gone) end.get_future().wait();
}

TEST(IssuedGroup, WithoutALimit) {
  on_two_ranks([](ProcessGroup& group, std::atomic<int>&, std::atomic<int>&) {
    std::vector<float> data(100'000, 1);
    AllReduceOptions options;
    options.timeout = std::chrono::nanoseconds::max();
    group.all_reduce({data.data(), data.size(), Dtype::f32}, options).wait();
    EXPECT_EQ(data[0], 2.0f);
  });
}

}  // namespace
}  // namespace unisono::testing
