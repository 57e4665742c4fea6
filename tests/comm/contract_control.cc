#include "comm/contract.h"

// Control records are combined before data is touched; withheld data stays as it was.

namespace unisono::testing {
namespace {

struct Shape {
  std::size_t words;
  std::size_t sums;
};

ControlRecord record_of(int rank, Shape shape) {
  ControlRecord record;
  for (std::size_t i = 0; i < shape.words; ++i)
    record.words.push_back(1ull << ((i * 7 + static_cast<std::size_t>(rank) * 5) % 64));
  for (std::size_t i = 0; i < shape.sums; ++i)
    record.sums.push_back(0.1 * (static_cast<double>(i) + 1) * (rank + 1) + 1e-9);
  return record;
}

ControlRecord combined(int size, Shape shape) {
  ControlRecord out = record_of(0, shape);
  for (int r = 1; r < size; ++r) {
    for (std::size_t i = 0; i < shape.words; ++i) out.words[i] |= record_of(r, shape).words[i];
  }
  for (std::size_t i = 0; i < shape.sums; ++i) {
    std::vector<double> values;
    for (int r = 0; r < size; ++r) values.push_back(record_of(r, shape).sums[i]);
    out.sums[i] = tree_sum(values);
  }
  return out;
}

const std::vector<Shape> kShapes = {{0, 0}, {1, 0}, {0, 1}, {1, 3}, {300, 2}, {700, 100}, {40, 300}};

using Operation = std::function<Work(ProcessGroup&, Buffer, Buffer, const CallOptions&)>;

AllReduceOptions with_sum(const CallOptions& o) {
  AllReduceOptions out;
  static_cast<CallOptions&>(out) = o;
  return out;
}

/// Every operation; the first buffer has `size` times the elements of the second.
const std::vector<std::pair<std::string, Operation>> kOperations = {
    {"all_reduce", [](auto& g, Buffer large, Buffer, auto& o) { return g.all_reduce(large, with_sum(o)); }},
    {"broadcast", [](auto& g, Buffer large, Buffer, auto& o) { return g.broadcast(large, 0, o); }},
    {"all_gather", [](auto& g, Buffer large, Buffer small, auto& o) { return g.all_gather(large, small, o); }},
    {"reduce_scatter",
     [](auto& g, Buffer large, Buffer small, auto& o) { return g.reduce_scatter(small, large, with_sum(o)); }},
    {"all_to_all",
     [](auto& g, Buffer large, Buffer, auto& o) {
       Buffer out = large;  // enough for a call that moves nothing, or whose result is not looked at
       return g.all_to_all(out, large, o);
     }},
    {"barrier", [](auto& g, Buffer, Buffer, auto& o) { return g.barrier(o); }},
};

}  // namespace

TEST_P(Contract, ControlRecordsAreCombined) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      for (const Shape& shape : kShapes) {
        const ControlRecord expected = combined(size, shape);
        for (const auto& [name, operation] : kOperations) {
          if (name == "all_to_all") continue;
          Bytes large(static_cast<std::size_t>(size) * 40), small(40);
          CallOptions options;
          options.control = record_of(group.rank(), shape);
          Work work = operation(group, buffer_of(large, Dtype::f32), buffer_of(small, Dtype::f32), options);
          work.wait();
          require(work.control().words == expected.words, name + ": words");
          require(work.control().sums == expected.sums, name + ": sums");
          require(!work.withheld(), name + ": nobody withheld");
        }
      }
    });
  }
}

/// Records of calls in flight do not mix.
TEST_P(Contract, ControlRecordsInFlight) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      std::vector<Work> works;
      for (std::size_t k = 0; k < 40; ++k) {
        CallOptions options;
        options.control = record_of(group.rank(), {k * 17 % 301, k % 4});
        works.push_back(group.barrier(options));
      }
      for (std::size_t k = works.size(); k-- > 0;) {
        works[k].wait();
        const ControlRecord expected = combined(size, {k * 17 % 301, k % 4});
        require(works[k].control().words == expected.words, "words of call " + std::to_string(k));
        require(works[k].control().sums == expected.sums, "sums of call " + std::to_string(k));
      }
    });
  }
}

TEST_P(Contract, WithheldDataStays) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      const auto n = static_cast<std::size_t>(size);
      Arena arena(group, 1 << 20);
      for (const auto& [name, operation] : kOperations) {
        for (int withholder = 0; withholder < size; ++withholder) {
          for (Place place : places_of(GetParam())) {
            arena.clear();
            const auto seed = static_cast<std::uint64_t>(group.rank());
            const Bytes large = make_elements(Dtype::f32, 1001 * n, seed),
                        small = make_elements(Dtype::f32, 1001, seed + 50);
            Buffer a = arena.put(large, Dtype::f32, place), b = arena.put(small, Dtype::f32, place);
            CallOptions options;
            options.withhold = group.rank() == withholder;
            options.control = record_of(group.rank(), {2, 1});
            Work work = operation(group, a, b, options);
            work.wait();
            require(work.withheld(), name + ": withheld() is false");
            require_same(large, a.data, name + " with withheld data");
            require_same(small, b.data, name + " with withheld data");
            require(work.control().words == combined(size, {2, 1}).words, name + ": words with withheld data");
            require(work.control().sums == combined(size, {2, 1}).sums, name + ": sums with withheld data");
          }
        }
        Bytes one = make_elements(Dtype::i32, 5, static_cast<std::uint64_t>(group.rank()));
        std::vector<Bytes> inputs;
        for (int r = 0; r < size; ++r) inputs.push_back(make_elements(Dtype::i32, 5, static_cast<std::uint64_t>(r)));
        group.all_reduce(buffer_of(one, Dtype::i32)).wait();
        require_same(reduce_reference(inputs, Dtype::i32, ReduceOp::sum), one.data(), "the call after a withheld one");
      }
    });
  }
}

TEST_P(Contract, ArrivalsAreOfThisCall) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      Work first = group.barrier();
      first.wait();
      Work second = group.barrier();
      second.wait();
      const auto a = first.arrivals(), b = second.arrivals();
      if (a.empty()) return;  // where it cannot be known
      require(a.size() == static_cast<std::size_t>(size) && b.size() == a.size(), "one arrival per rank");
      for (std::size_t r = 0; r < a.size(); ++r) {
        for (std::size_t s = 0; s < b.size(); ++s)
          require(a[r] <= b[s], "a barrier was entered before the one before ended");
      }
    });
  }
}

}  // namespace unisono::testing
