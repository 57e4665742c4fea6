#include "comm/contract.h"

#include <condition_variable>
#include <cstring>
#include <iostream>
#include <mutex>
#include <thread>

#include "comm/test_store.h"

namespace unisono::testing {

void run_ranks(const Transport& transport, int size, int groups,
               const std::function<void(const std::vector<std::shared_ptr<ProcessGroup>>&)>& body) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Maker> makers;
  for (int g = 0; g < groups; ++g) makers.push_back(transport.world(size, kPatience));
  const auto rank_main = [&](int rank) {
    std::vector<std::shared_ptr<ProcessGroup>> mine;
    try {
      for (int g = 0; g < groups; ++g) {
        mine.push_back(makers[static_cast<std::size_t>(g)]({.rank = rank,
                                                            .size = size,
                                                            .store = store,
                                                            .timeout = kPatience,
                                                            .start_timeout = kPatience,
                                                            .prefix = "group" + std::to_string(g)}));
      }
      body(mine);
    } catch (const std::exception& e) {
      ADD_FAILURE() << transport.name << ", rank " << rank << " of " << size << ": " << e.what();
      for (const auto& group : mine) group->abort(Error(ErrorCode::internal, "the test failed on another rank"));
    }
  };
  if (transport.own_rank >= 0) {
    if (transport.own_rank < size) rank_main(transport.own_rank);
    return;
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back(rank_main, r);
  for (auto& t : threads) t.join();
}

void run_ranks(const Transport& transport, int size, const RankBody& body) {
  run_ranks(transport, size, 1, [&](const auto& groups) { body(*groups[0]); });
}

Meeting::Meeting(const Transport& transport, int size) {
  if (transport.meeting) {
    meet_ = transport.meeting(size);
    return;
  }
  struct Place {
    std::mutex mutex;
    std::condition_variable changed;
    int there = 0;
  };
  meet_ = [place = std::make_shared<Place>(), size] {
    std::unique_lock lock(place->mutex);
    const int needed = (place->there++ / size + 1) * size;
    place->changed.notify_all();
    const bool all = place->changed.wait_for(lock, kPatience, [&] { return place->there >= needed; });
    require(all, "the other ranks never came to the meeting");
  };
}

std::optional<Failure> failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return Failure{e.code(), e.what()};
  }
  return std::nullopt;
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

void require_same(const Bytes& expected, const void* actual, const std::string& where) {
  if (expected.empty() || std::memcmp(expected.data(), actual, expected.size()) == 0) return;
  const auto* bytes = static_cast<const unsigned char*>(actual);
  std::size_t i = 0;
  while (expected[i] == bytes[i]) ++i;
  throw std::runtime_error(where + ": byte " + std::to_string(i) + " of " + std::to_string(expected.size()) + " is " +
                           std::to_string(bytes[i]) + ", expected " + std::to_string(expected[i]));
}

Buffer buffer_of(Bytes& bytes, Dtype dtype) {
  return {.data = bytes.data(), .count = bytes.size() / size_of(dtype), .dtype = dtype};
}

Arena::Arena(ProcessGroup& group, std::size_t bytes)
    : even_rank_(group.rank() % 2 == 0), shared_(group.allocate(bytes)) {}

Buffer Arena::put(const Bytes& bytes, Dtype dtype, Place place) {
  const std::size_t offset = used_ + 64;
  used_ = offset + (bytes.size() + 63) / 64 * 64;
  void* data = nullptr;
  if (place == Place::allocated || (place == Place::mixed && even_rank_)) {
    require(used_ <= shared_.count, "the arena is too small for the test");
    data = static_cast<unsigned char*>(shared_.data) + offset;
  } else {
    heap_.push_back(std::make_unique<Bytes>(bytes.size() + 8));
    data = heap_.back()->data() + 8;  // aligned for the elements, not to a cache line
  }
  if (!bytes.empty()) std::memcpy(data, bytes.data(), bytes.size());
  return {.data = data, .count = bytes.size() / size_of(dtype), .dtype = dtype};
}

void Arena::clear() {
  used_ = 0;
  heap_.clear();
}

std::vector<int> world_sizes(const Transport& transport) {
  std::vector<int> all = {1, 2, 3, 4, 5, 6, 7, 8};
  if (kSanitized) {
    all = transport.delicate ? std::vector{1, 2, 3, 5} : std::vector{1, 3};
    static std::once_flag said;
    std::call_once(said, [] { std::cout << "sanitizer: 1, 2, 3 and 5 ranks instead of 1 to 8, and a smaller grid\n"; });
  }
  std::erase_if(all, [&](int n) { return n > transport.max_ranks; });
  return all;
}

bool Contract::needs(int ranks) {
  if (GetParam().max_ranks >= ranks) return true;
  [&] { GTEST_SKIP() << "needs " << ranks << " ranks; " << GetParam().name << " has " << GetParam().max_ranks; }();
  return false;
}

}  // namespace unisono::testing
