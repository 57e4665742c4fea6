#include <algorithm>

#include "comm/contract.h"

// Every operation gives the bits that the reference gives, wherever the data lies.

namespace unisono::testing {
namespace {

const std::vector<std::size_t> kCounts = {0, 1, 3, 1000, 4097};
constexpr std::size_t kLarge = 300001;  // more than any chunk

std::vector<Bytes> inputs_of(Dtype dtype, int size, std::size_t count, Numbers numbers = Numbers::any) {
  std::vector<Bytes> inputs;
  for (int r = 0; r < size; ++r)
    inputs.push_back(make_elements(dtype, count, 1000 * count + static_cast<std::uint64_t>(r), numbers));
  return inputs;
}

std::string label(const char* operation, Dtype dtype, ReduceOp op, std::size_t count, Place place) {
  const char* places[] = {"allocated", "ordinary", "mixed"};
  return std::string(operation) + " " + std::string(to_string(dtype)) + " " + std::string(to_string(op)) + " of " +
         std::to_string(count) + ", " + places[static_cast<int>(place)];
}

/// Inputs of moving operations, made once for all ranks: large ones for f32 and a few world sizes only.
struct Data {
  Dtype dtype;
  std::size_t count;
  std::vector<Bytes> inputs;
};

std::vector<Data> data_of(int size, std::size_t large, std::size_t blocks) {
  std::vector<Data> all;
  for (Dtype dtype : kDtypes) {
    std::vector<std::size_t> counts = kCounts;
    if (kSanitized) counts.pop_back();
    if (dtype == Dtype::f32 && (size == 2 || size == 3)) counts.push_back(large);
    for (std::size_t count : counts) all.push_back({dtype, count, inputs_of(dtype, size, count * blocks)});
  }
  return all;
}

struct Case {
  Dtype dtype;
  ReduceOp op;
  std::size_t count;
  std::vector<Bytes> inputs;
  Bytes expected;
};

std::vector<Case> cases_of(const Transport& transport, int size, const std::vector<std::size_t>& counts,
                           const std::vector<ReduceOp>& ops, const std::vector<Dtype>& dtypes = kDtypes) {
  std::vector<Case> cases;
  for (Dtype dtype : dtypes) {
    for (ReduceOp op : ops) {
      for (std::size_t count : counts) {
        if (!is_defined(op, dtype)) continue;
        Case c{dtype, op, count, inputs_of(dtype, size, count, transport.numbers), {}};
        c.expected = reduce_reference(c.inputs, dtype, op);
        cases.push_back(std::move(c));
      }
    }
  }
  return cases;
}

void all_reduce_cases(const Transport& transport, ProcessGroup& group, Arena& arena, const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    for (Place place : places_of(transport)) {
      arena.clear();
      Buffer data = arena.put(c.inputs[static_cast<std::size_t>(group.rank())], c.dtype, place);
      AllReduceOptions options;
      options.op = c.op;
      group.all_reduce(data, options).wait();
      require_same(c.expected, data.data, label("all_reduce", c.dtype, c.op, c.count, place));
    }
  }
}

Bytes slice(const Bytes& bytes, std::size_t begin, std::size_t length) {
  const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(length)};
}

}  // namespace

TEST_P(Contract, AllReduceEveryDtypeOpCount) {
  for (int size : world_sizes(GetParam())) {
    const auto cases = cases_of(GetParam(), size, kCounts, kOps);
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      Arena arena(group, 64 << 10);
      all_reduce_cases(GetParam(), group, arena, cases);
    });
  }
}

TEST_P(Contract, AllReduceLargerThanAChunk) {
  for (int size : world_sizes(GetParam())) {
    if (size != 1 && size != 2 && size != 3 && size != 8) continue;
    const auto cases = kSanitized ? cases_of(GetParam(), size, {kLarge}, {ReduceOp::sum}, {Dtype::f32, Dtype::u8})
                                  : cases_of(GetParam(), size, {kLarge}, {ReduceOp::sum, ReduceOp::avg});
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      Arena arena(group, 3 << 20);
      all_reduce_cases(GetParam(), group, arena, cases);
    });
  }
}

TEST_P(Contract, DivideBySum) {
  for (int size : world_sizes(GetParam())) {
    for (Dtype dtype : {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16}) {
      const auto inputs = inputs_of(dtype, size, 1000, GetParam().numbers);
      run_ranks(GetParam(), size, [&](ProcessGroup& group) {
        Arena arena(group, 64 << 10);
        const auto r = static_cast<std::size_t>(group.rank());
        for (double weight : {1.0, 0.1, 7.0, 0.0}) {
          std::vector<double> weights;
          for (int k = 0; k < size; ++k) weights.push_back(weight * (k + 1));
          const Bytes expected = reduce_reference(inputs, dtype, ReduceOp::sum, tree_sum(weights));
          for (Place place : places_of(GetParam())) {
            arena.clear();
            Buffer data = arena.put(inputs[r], dtype, place);
            AllReduceOptions options;
            options.divide_by_sum = 1;
            options.control.sums = {99, weights[r]};
            Work work = group.all_reduce(data, options);
            work.wait();
            require_same(expected, data.data, label("weighted all_reduce", dtype, options.op, 1000, place));
            require(work.control().sums[1] == tree_sum(weights), "the combined weight");
          }
        }
      });
    }
  }
}

TEST_P(Contract, Broadcast) {
  for (int size : world_sizes(GetParam())) {
    const auto all = data_of(size, kLarge, 1);
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      Arena arena(group, 3 << 20);
      for (const auto& [dtype, count, inputs] : all) {
        for (int root : {0, size / 2, size - 1}) {
          for (Place place : places_of(GetParam())) {
            arena.clear();
            Buffer data = arena.put(inputs[static_cast<std::size_t>(group.rank())], dtype, place);
            group.broadcast(data, root).wait();
            require_same(inputs[static_cast<std::size_t>(root)], data.data,
                         label("broadcast", dtype, ReduceOp::sum, count, place));
          }
        }
      }
    });
  }
}

namespace {

/// From an input of its own, then from one that lies at its place in the output.
void all_gather_case(ProcessGroup& group, Arena& arena, const Data& d, const Bytes& expected, Place place) {
  const auto r = static_cast<std::size_t>(group.rank());
  const std::size_t bytes = d.inputs[r].size();
  arena.clear();
  Buffer in = arena.put(d.inputs[r], d.dtype, place);
  Buffer out = arena.put(Bytes(expected.size(), 0x5a), d.dtype, place);
  group.all_gather(out, in).wait();
  require_same(expected, out.data, label("all_gather", d.dtype, ReduceOp::sum, d.count, place));
  require_same(d.inputs[r], in.data, "the input of all_gather");

  arena.clear();
  Bytes partly(expected.size(), 0x5a);
  std::copy(d.inputs[r].begin(), d.inputs[r].end(), partly.begin() + static_cast<std::ptrdiff_t>(r * bytes));
  out = arena.put(partly, d.dtype, place);
  in = out;
  in.data = static_cast<unsigned char*>(out.data) + r * bytes;
  in.count = d.count;
  group.all_gather(out, in).wait();
  require_same(expected, out.data, label("all_gather in place", d.dtype, ReduceOp::sum, d.count, place));
}

}  // namespace

TEST_P(Contract, AllGather) {
  for (int size : world_sizes(GetParam())) {
    const auto all = data_of(size, kLarge, 1);
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      Arena arena(group, 8 << 20);
      for (const Data& d : all) {
        Bytes expected;
        for (const Bytes& b : d.inputs) expected.insert(expected.end(), b.begin(), b.end());
        for (Place place : places_of(GetParam())) all_gather_case(group, arena, d, expected, place);
      }
    });
  }
}

TEST_P(Contract, ReduceScatter) {
  for (int size : world_sizes(GetParam())) {
    const auto n = static_cast<std::size_t>(size);
    std::vector<Case> cases;
    for (std::size_t count : {0ul, 1ul, 3ul, 1000ul}) {
      const auto some = cases_of(GetParam(), size, {count * n}, {ReduceOp::sum, ReduceOp::avg, ReduceOp::max});
      cases.insert(cases.end(), some.begin(), some.end());
    }
    if (size == 3) cases.push_back(cases_of(GetParam(), size, {kLarge / n * n}, {ReduceOp::sum})[0]);
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      const auto r = static_cast<std::size_t>(group.rank());
      Arena arena(group, 3 << 20);
      for (const Case& c : cases) {
        const std::size_t bytes = c.count / n * size_of(c.dtype);
        for (Place place : places_of(GetParam())) {
          arena.clear();
          Buffer in = arena.put(c.inputs[r], c.dtype, place);
          Buffer out = arena.put(Bytes(bytes, 0x5a), c.dtype, place);
          AllReduceOptions options;
          options.op = c.op;
          group.reduce_scatter(out, in, options).wait();
          require_same(slice(c.expected, r * bytes, bytes), out.data,
                       label("reduce_scatter", c.dtype, c.op, c.count, place));
          require_same(c.inputs[r], in.data, "the input of reduce_scatter");
        }
      }
    });
  }
}

TEST_P(Contract, AllToAll) {
  for (int size : world_sizes(GetParam())) {
    const auto n = static_cast<std::size_t>(size);
    const auto all = data_of(size, 150001, n);
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      const auto r = static_cast<std::size_t>(group.rank());
      Arena arena(group, 6 << 20);
      for (const auto& [dtype, count, inputs] : all) {
        const std::size_t bytes = count * size_of(dtype);
        Bytes expected;
        for (const Bytes& b : inputs) {
          const Bytes part = slice(b, r * bytes, bytes);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        for (Place place : places_of(GetParam())) {
          arena.clear();
          Buffer in = arena.put(inputs[r], dtype, place);
          Buffer out = arena.put(Bytes(expected.size(), 0x5a), dtype, place);
          group.all_to_all(out, in).wait();
          require_same(expected, out.data, label("all_to_all", dtype, ReduceOp::sum, count, place));
          require_same(inputs[r], in.data, "the input of all_to_all");
        }
      }
    });
  }
}

TEST_P(Contract, NoElementsAndNullData) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      const Buffer none = {};
      group.all_reduce(none).wait();
      group.broadcast(none, size - 1).wait();
      group.all_gather(none, none).wait();
      group.reduce_scatter(none, none).wait();
      group.all_to_all(none, none).wait();
      group.barrier().wait();
    });
  }
}

}  // namespace unisono::testing
