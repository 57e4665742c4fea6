#include <algorithm>
#include <cstdint>
#include <random>

#include "comm/contract.h"

// Memory that a group reduces in place: made together, given back one by one.

namespace unisono::testing {
namespace {

std::vector<Bytes> inputs_of(const Transport& transport, int size, std::size_t count, std::uint64_t seed) {
  std::vector<Bytes> inputs;
  for (int r = 0; r < size; ++r)
    inputs.push_back(make_elements(Dtype::f32, count, seed * 10 + static_cast<std::uint64_t>(r), transport.numbers));
  return inputs;
}

/// All-reduces in this memory, at an offset, and looks at the result and around it.
void use(const Transport& transport, ProcessGroup& group, const Buffer& memory, std::uint64_t seed) {
  const std::size_t count = std::min<std::size_t>((memory.count - 128) / 4, 5000);
  const auto inputs = inputs_of(transport, group.size(), count, seed);
  auto* begin = static_cast<unsigned char*>(memory.data);
  begin[63] = begin[64 + count * 4] = static_cast<unsigned char>(group.rank() + 1);
  std::copy_n(inputs[static_cast<std::size_t>(group.rank())].data(), count * 4, begin + 64);
  group.all_reduce({.data = begin + 64, .count = count, .dtype = Dtype::f32, .owner = memory.owner}).wait();
  require_same(reduce_reference(inputs, Dtype::f32, ReduceOp::sum), begin + 64, "in allocated memory");
  require(begin[63] == group.rank() + 1 && begin[64 + count * 4] == group.rank() + 1, "a byte beside the data changed");
}

}  // namespace

TEST_P(Contract, AllocatedMemoryIsZeroedAndAligned) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      for (std::size_t bytes : {1ul, 64ul, 4096ul, 4097ul, 1ul << 20}) {
        const Buffer memory = group.allocate(bytes);
        require(memory.count == bytes && memory.dtype == Dtype::u8, "shape of allocated memory");
        require(reinterpret_cast<std::uintptr_t>(memory.data) % 4096 == 0, "alignment of allocated memory");
        require(memory.owner != nullptr, "owner of allocated memory");
        require_same(Bytes(bytes, 0), memory.data, "new memory");
        std::fill_n(static_cast<unsigned char*>(memory.data), bytes, 0xee);  // the next one must be zeroed all the same
      }
    });
  }
}

TEST_P(Contract, AllocateAndFreeManyTimes) {
  const int rounds = kSanitized ? 60 : 200;
  const int size = std::min(GetParam().max_ranks, 3);
  run_ranks(GetParam(), size, [&](ProcessGroup& group) {
    for (int k = 0; k < rounds; ++k) {
      const Buffer memory = group.allocate(4096 + static_cast<std::size_t>(k % 7) * 30000);
      use(GetParam(), group, memory, static_cast<std::uint64_t>(k));
    }
  });
}

TEST_P(Contract, FreedInAnotherOrderOnEachRank) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      std::mt19937 random(static_cast<unsigned>(group.rank()));
      for (std::uint64_t round = 0; round < 6; ++round) {
        std::vector<Buffer> all;
        for (std::size_t k = 0; k < 8; ++k) all.push_back(group.allocate(8192 + 4096 * k));
        std::vector<std::size_t> order = {0, 1, 2, 3, 4, 5, 6, 7};
        std::shuffle(order.begin(), order.end(), random);
        for (std::size_t k = 0; k < 4; ++k) {
          if (order[k] != 7) all[order[k]] = {};  // not the last: it is used on all ranks below
        }
        const Buffer fresh = group.allocate(8192);
        use(GetParam(), group, fresh, 100 + round);
        use(GetParam(), group, all[7], 200 + round);
      }
    });
  }
}

TEST_P(Contract, MemoryOutlivesTheGroup) {
  const int size = std::min(GetParam().max_ranks, 2);
  std::vector<Buffer> kept(static_cast<std::size_t>(size));
  run_ranks(GetParam(), size, [&](ProcessGroup& group) {
    Buffer memory = group.allocate(10000);
    use(GetParam(), group, memory, 1);
    kept[static_cast<std::size_t>(group.rank())] = memory;
  });
  for (Buffer& memory : kept) {
    if (GetParam().own_rank >= 0 && &memory != &kept[static_cast<std::size_t>(GetParam().own_rank) % kept.size()])
      continue;
    if (GetParam().own_rank >= size) continue;
    ASSERT_NE(nullptr, memory.data);
    std::fill_n(static_cast<unsigned char*>(memory.data), memory.count, 1);
    memory = {};
  }
}

TEST_P(Contract, MemoryThatDoesNotFitIsRefusedByAll) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      const std::size_t bytes = std::size_t{1} << 50;
      const auto failure = failure_of([&] { group.allocate(bytes); });
      require(failure.has_value(), "a pebibyte was allocated");
      require(failure->code == ErrorCode::invalid_argument, "the code of: " + failure->text);
      require(failure->text.find(std::to_string(bytes)) != std::string::npos, "the size is not in: " + failure->text);
      const Buffer memory = group.allocate(8192);  // the group still works
      use(GetParam(), group, memory, 9);
    });
  }
}

}  // namespace unisono::testing
