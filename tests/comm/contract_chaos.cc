#include <algorithm>
#include <random>
#include <thread>

#include "comm/contract.h"

// A long random life of a group: the same on every rank but for when each yields and in which order it waits.

namespace unisono::testing {
namespace {

enum class Kind { all_reduce, weighted, broadcast, all_gather, reduce_scatter, all_to_all, barrier, withheld };

/// One call as drawn from the seed, the same on all ranks.
struct Plan {
  Kind kind;
  Dtype dtype;
  ReduceOp op;
  std::size_t count;
  int root;
  Place place;
  std::uint64_t seed;
};

Plan draw(std::mt19937_64& random, const std::vector<Place>& places, int size, std::uint64_t index) {
  Plan p;
  p.kind = static_cast<Kind>(random() % 8);
  p.dtype = kDtypes[random() % kDtypes.size()];
  if (p.kind == Kind::weighted) p.dtype = kDtypes[random() % 4];
  do p.op = kOps[random() % kOps.size()];
  while (!is_defined(p.op, p.dtype));
  if (p.kind == Kind::weighted) p.op = ReduceOp::sum;
  p.count = random() % 4 == 0 ? random() % 3000 : random() % 40;
  p.root = static_cast<int>(random() % static_cast<unsigned>(size));
  p.place = places[random() % places.size()];
  p.seed = index;
  return p;
}

Bytes blocks_of(const std::vector<Bytes>& inputs, std::size_t index, std::size_t bytes) {
  Bytes out;
  for (const Bytes& b : inputs) {
    out.insert(out.end(), b.begin() + static_cast<std::ptrdiff_t>(index * bytes),
               b.begin() + static_cast<std::ptrdiff_t>((index + 1) * bytes));
  }
  return out;
}

struct Running {
  Plan plan;
  Work work;
  Buffer out;
  Bytes expected;
  std::uint64_t word = 0;
  double sum = 0;
};

/// Makes the call of a plan and works out what must come of it.
Running start(const Transport& transport, ProcessGroup& group, const Plan& p, Arena& arena) {
  const auto n = static_cast<std::size_t>(group.size()), r = static_cast<std::size_t>(group.rank());
  const bool wide = p.kind == Kind::reduce_scatter || p.kind == Kind::all_to_all;
  std::vector<Bytes> inputs;
  std::vector<double> sums;
  Running run{.plan = p};
  for (std::size_t k = 0; k < n; ++k) {
    inputs.push_back(make_elements(p.dtype, p.count * (wide ? n : 1), p.seed * 64 + k, transport.numbers));
    sums.push_back(0.3 * static_cast<double>(k + p.seed % 5));
    run.word |= 1ull << ((p.seed + 3 * k) % 64);
  }
  run.sum = tree_sum(sums);
  const std::size_t bytes = p.count * size_of(p.dtype);
  AllReduceOptions options;
  options.op = p.op;
  options.tag = {.step = static_cast<std::int64_t>(p.seed), .bucket = 1, .what = "chaos"};
  options.control.words = {1ull << ((p.seed + 3 * r) % 64)};
  options.control.sums = {sums[r]};
  Buffer in = arena.put(inputs[r], p.dtype, p.place);
  run.out = in;
  switch (p.kind) {
    case Kind::weighted:
      options.divide_by_sum = 0;
      run.expected = reduce_reference(inputs, p.dtype, ReduceOp::sum, run.sum);
      run.work = group.all_reduce(in, options);
      break;
    case Kind::withheld:
      options.withhold = group.rank() == p.root;
      run.expected = inputs[r];
      run.work = group.all_reduce(in, options);
      break;
    case Kind::broadcast:
      run.expected = inputs[static_cast<std::size_t>(p.root)];
      run.work = group.broadcast(in, p.root, options);
      break;
    case Kind::all_gather:
      run.out = arena.put(Bytes(bytes * n), p.dtype, p.place);
      run.expected = blocks_of(inputs, 0, bytes);
      run.work = group.all_gather(run.out, in, options);
      break;
    case Kind::reduce_scatter:
      run.out = arena.put(Bytes(bytes), p.dtype, p.place);
      run.expected = blocks_of({reduce_reference(inputs, p.dtype, p.op)}, r, bytes);
      run.work = group.reduce_scatter(run.out, in, options);
      break;
    case Kind::all_to_all:
      run.out = arena.put(Bytes(bytes * n), p.dtype, p.place);
      run.expected = blocks_of(inputs, r, bytes);
      run.work = group.all_to_all(run.out, in, options);
      break;
    case Kind::barrier:
      run.work = group.barrier(options);
      break;
    case Kind::all_reduce:
      run.expected = reduce_reference(inputs, p.dtype, p.op);
      run.work = group.all_reduce(in, options);
      break;
  }
  return run;
}

void finish(Running& run) {
  const std::string where = "chaos call " + std::to_string(run.plan.seed) + ", kind " +
                            std::to_string(static_cast<int>(run.plan.kind)) + ", " +
                            std::string(to_string(run.plan.dtype)) + " " + std::string(to_string(run.plan.op)) +
                            " of " + std::to_string(run.plan.count);
  run.work.wait();
  require_same(run.expected, run.out.data, where);
  require(run.work.withheld() == (run.plan.kind == Kind::withheld), where + ": withheld");
  require(run.work.control().words == std::vector{run.word}, where + ": words");
  require(run.work.control().sums == std::vector{run.sum}, where + ": sums");
}

}  // namespace

void chaos(const Transport& transport, ProcessGroup& group, std::uint64_t seed, int calls) {
  std::mt19937_64 common(seed), own(seed * 100 + static_cast<std::uint64_t>(group.rank()));
  Arena arena(group, 24 << 20);
  int made = 0;
  while (made < calls) {
    arena.clear();
    std::vector<Running> running;
    for (std::uint64_t burst = 1 + common() % 20; burst > 0 && made < calls; --burst, ++made) {
      for (std::uint64_t k = own() % 4; k > 0; --k) std::this_thread::yield();
      const Plan plan = draw(common, places_of(transport), group.size(), static_cast<std::uint64_t>(made));
      running.push_back(start(transport, group, plan, arena));
      if (own() % 3 == 0) running[own() % running.size()].work.poll();
    }
    std::shuffle(running.begin(), running.end(), own);
    for (Running& run : running) finish(run);
  }
}

TEST_P(Contract, Chaos) {
  for (int size : world_sizes(GetParam())) {
    for (std::uint64_t seed : {1, 2}) {
      run_ranks(GetParam(), size, [&](ProcessGroup& group) { chaos(GetParam(), group, seed, kSanitized ? 100 : 400); });
    }
  }
}

}  // namespace unisono::testing
