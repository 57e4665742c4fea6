#include <cstring>

#include "comm/fake/fake_state.h"
#include "comm/reduce_kernels.h"

namespace unisono {
namespace {

unsigned char* block(const Buffer& buffer, std::size_t index, std::size_t bytes) {
  return static_cast<unsigned char*>(buffer.data) + index * bytes;
}

void move_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

void combine_control(FakeRound& round) {
  const std::size_t n = round.entries.size();
  round.control = round.entries[0]->call.control;
  for (std::size_t r = 1; r < n; ++r) {
    const auto& words = round.entries[r]->call.control.words;
    for (std::size_t w = 0; w < words.size(); ++w) round.control.words[w] |= words[w];
  }
  std::vector<const void*> in;
  for (const auto& entry : round.entries) in.push_back(entry->call.control.sums.data());
  std::vector<double> sums(round.control.sums.size());
  void* out[] = {sums.data()};
  tree_reduce(in, out, sums.size(), Dtype::f64, ReduceOp::sum, 1);
  round.control.sums = std::move(sums);
}

double divisor_of(const FakeRound& round) {
  const FakeCall& call = round.entries[0]->call;
  if (call.op == ReduceOp::avg) return static_cast<double>(round.entries.size());
  if (call.divide_by_sum >= 0) return round.control.sums[static_cast<std::size_t>(call.divide_by_sum)];
  return 1;
}

void reduce(const FakeRound& round, const std::vector<const void*>& in, const std::vector<void*>& out,
            std::size_t count) {
  const FakeCall& call = round.entries[0]->call;
  const ReduceOp op = call.op == ReduceOp::avg ? ReduceOp::sum : call.op;
  tree_reduce(in, out, count, call.dtype, op, divisor_of(round));
}

void all_reduce(const FakeRound& round) {
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const auto& entry : round.entries) in.push_back(entry->in.data), out.push_back(entry->out.data);
  reduce(round, in, out, round.entries[0]->in.count);
}

void reduce_scatter(const FakeRound& round) {
  const std::size_t bytes = round.entries[0]->out.bytes();
  for (std::size_t j = 0; j < round.entries.size(); ++j) {
    std::vector<const void*> in;
    for (const auto& entry : round.entries) in.push_back(block(entry->in, j, bytes));
    reduce(round, in, {round.entries[j]->out.data}, round.entries[j]->out.count);
  }
}

void broadcast(const FakeRound& round) {
  const FakeEntry& root = *round.entries[static_cast<std::size_t>(round.entries[0]->call.root)];
  for (const auto& entry : round.entries) move_bytes(entry->out.data, root.in.data, root.in.bytes());
}

void all_gather(const FakeRound& round) {
  for (const auto& to : round.entries) {
    for (std::size_t r = 0; r < round.entries.size(); ++r) {
      const Buffer& from = round.entries[r]->in;
      move_bytes(block(to->out, r, from.bytes()), from.data, from.bytes());
    }
  }
}

/// Through copies, so that `out` may be `in`.
void all_to_all(const FakeRound& round) {
  const std::size_t n = round.entries.size();
  const std::size_t bytes = round.entries[0]->in.bytes() / n;
  std::vector<std::vector<unsigned char>> sent(n);
  for (std::size_t i = 0; i < n; ++i) {
    sent[i].resize(bytes * n);
    move_bytes(sent[i].data(), round.entries[i]->in.data, bytes * n);
  }
  for (std::size_t j = 0; j < n; ++j) {
    for (std::size_t i = 0; i < n; ++i) {
      move_bytes(block(round.entries[j]->out, i, bytes), sent[i].data() + j * bytes, bytes);
    }
  }
}

}  // namespace

void execute(FakeRound& round) {
  combine_control(round);
  for (const auto& entry : round.entries) {
    round.withheld |= entry->call.withhold;
    round.arrivals.push_back(entry->entered_ns);
  }
  if (round.withheld) return;
  const std::string& operation = round.entries[0]->call.operation;
  if (operation == "all_reduce") all_reduce(round);
  if (operation == "reduce_scatter") reduce_scatter(round);
  if (operation == "broadcast") broadcast(round);
  if (operation == "all_gather") all_gather(round);
  if (operation == "all_to_all") all_to_all(round);
}

}  // namespace unisono
