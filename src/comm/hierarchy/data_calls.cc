// The calls that move data, each as a journey: what is laid out how, and which groups take it on which stretch.
#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/finish_sum.h"
#include "comm/hierarchy/hierarchy_engine.h"

namespace unisono {
namespace {

AllReduceOptions reducing(ReduceOp op, std::chrono::milliseconds timeout) {
  AllReduceOptions out;
  static_cast<CallOptions&>(out) = local_options("to other hosts", timeout);
  out.op = op == ReduceOp::avg ? ReduceOp::sum : op;
  return out;
}

// The beginning of `to` with `from`, the rest with zeros.
void fill(const Buffer& to, const Buffer& from) {
  std::memcpy(to.data, from.data, from.bytes());
  std::memset(static_cast<std::byte*>(to.data) + from.bytes(), 0, to.bytes() - from.bytes());
}

// A result to where it belongs: rounded to 16 bits if it was made in f32.
void deliver(const Buffer& result, const Buffer& out) {
  if (result.dtype != out.dtype) {
    finish_sum(result.data, out, 1);
  } else if (result.data != out.data) {
    std::memcpy(out.data, result.data, out.bytes());
  }
}

}  // namespace

Dtype HierarchyEngine::wire_dtype(const DataCall& call) const {
  const bool half = call.out.dtype == Dtype::f16 || call.out.dtype == Dtype::bf16;
  return half && !(call.may_round && !ordered_ && layout_.hosts.size() == 2) ? Dtype::f32 : call.out.dtype;
}

// A block per rank of the host: those of carriers hold the data, the others zeros.
Journey HierarchyEngine::all_reduce(const DataCall& call, Milliseconds timeout) const {
  const Dtype wire = wire_dtype(call);
  const std::size_t size = layout_.own().size(), count = call.out.count, length = (count + carriers() - 1) / carriers();
  Buffer blocks = call.out;
  if (wire != call.out.dtype || size * length != count) {
    blocks = scratch(size * length, wire);
    copy_widened(call.out, blocks);
    const Buffer rest = part_of(blocks, count, size * length - count);
    std::memset(rest.data, 0, rest.bytes());
  }
  const Buffer slice = alone() ? blocks : scratch(length, wire);
  Journey journey;
  if (!alone()) {
    journey.collect = [=, this, op = call.op] {
      return collect_->reduce_scatter(slice, blocks, reducing(op, timeout));
    };
    journey.spread = [=, this] {
      return spread_->all_gather(blocks, slice, local_options("from other hosts", timeout));
    };
  }
  if (carries()) {
    journey.cross = [=, this, op = call.op](double) {
      return across_->start({Operation::all_reduce, slice, {}, op}, timeout);
    };
  }
  journey.finish = [blocks, out = call.out](double) { deliver(blocks, out); };
  return journey;
}

// The root's host has the data at once, and its carriers send a slice each.
Journey HierarchyEngine::broadcast(const DataCall& call, Milliseconds timeout) const {
  const auto is_root = [&](int rank) { return rank == call.root; };
  const auto with_root = std::find_if(layout_.hosts.begin(), layout_.hosts.end(), [&](const auto& ranks) {
    return std::any_of(ranks.begin(), ranks.end(), is_root);
  });
  const auto root_host = static_cast<std::size_t>(with_root - layout_.hosts.begin());
  const int root_place =
      static_cast<int>(std::find_if(with_root->begin(), with_root->end(), is_root) - with_root->begin());
  const Buffer data = bytes_of(call.out);
  const std::size_t length = (data.count + carriers() - 1) / carriers(),
                    begin = std::min(data.count, layout_.place * length);
  const bool sends = layout_.host == root_host;
  const int across_root = carries() ? static_cast<int>(layout_.position(layout_.place, root_host)) : 0;
  const Buffer slice = scratch(length, Dtype::u8);
  const Buffer blocks = sends ? Buffer{} : scratch(layout_.own().size() * length, Dtype::u8);
  Journey journey;
  if (sends && !alone()) {
    journey.collect = [=, this] {
      return collect_->broadcast(data, root_place, local_options("to other hosts", timeout));
    };
  }
  if (carries()) {
    journey.cross = [=, this](double) {
      if (sends) fill(slice, part_of(data, begin, std::min(length, data.count - begin)));
      return across_->start({Operation::broadcast, slice, {}, ReduceOp::sum, across_root}, timeout);
    };
  }
  if (sends) return journey;
  if (!alone()) {
    if (!carries()) std::memset(slice.data, 0, slice.bytes());
    journey.spread = [=, this] {
      return spread_->all_gather(blocks, slice, local_options("from other hosts", timeout));
    };
  }
  journey.finish = [data, from = alone() ? slice : blocks](double) { std::memcpy(data.data, from.data, data.bytes()); };
  return journey;
}

// The host's blocks, a part of them from every host, and those of all carriers.
Journey HierarchyEngine::all_gather(const DataCall& call, Milliseconds timeout) const {
  const std::size_t block = call.in.bytes(), hosts = layout_.hosts.size(), size = layout_.own().size();
  const HostBlocks blocks(layout_, block);
  const std::size_t part = blocks.part();
  const Buffer own = layout_.even() ? Buffer{} : zeros(std::max(size * block, carriers() * part), Dtype::u8);
  const Buffer mine = scratch(part, Dtype::u8), got = scratch(hosts * part, Dtype::u8);
  const Buffer all = alone() ? got : scratch(size * hosts * part, Dtype::u8);
  if (layout_.even() || !carries()) std::memset(mine.data, 0, mine.bytes());
  if (!carries()) std::memset(got.data, 0, got.bytes());
  if (layout_.even()) std::memcpy(mine.data, call.in.data, block);
  const Buffer in = layout_.even() ? Buffer{} : scratch(block, Dtype::u8);  // it may lie inside `out`
  if (!layout_.even()) std::memcpy(in.data, call.in.data, block);
  Journey journey;
  if (!layout_.even()) {
    journey.collect = [=, this] {
      const Buffer host = part_of(own, 0, size * block);
      if (!alone()) return collect_->all_gather(host, in, local_options("to other hosts", timeout));
      std::memcpy(host.data, in.data, block);
      return Work();
    };
  }
  if (carries()) {
    journey.cross = [=, this](double) {
      if (!layout_.even()) std::memcpy(mine.data, part_of(own, layout_.place * part, 0).data, part);
      return across_->start({Operation::all_gather, got, mine}, timeout);
    };
  }
  if (!alone())
    journey.spread = [=, this] { return spread_->all_gather(all, got, local_options("from other hosts", timeout)); };
  journey.finish = [all, blocks, hosts, block, out = call.out](double) {
    blocks.for_each([&](const HostBlocks::Piece& piece) {
      const std::size_t from = (piece.carrier * hosts + piece.host_rank) * blocks.part() + piece.in_part;
      std::memcpy(static_cast<std::byte*>(out.data) + piece.rank * block + piece.in_block, part_of(all, from, 0).data,
                  piece.count);
    });
  };
  return journey;
}

// For every carrier a part of each host's blocks: summed inside the host, then over hosts, each of which gets its own.
Journey HierarchyEngine::reduce_scatter(const DataCall& call, Milliseconds timeout) const {
  const Dtype wire = wire_dtype(call);
  const std::size_t block = call.out.count, hosts = layout_.hosts.size(), size = layout_.own().size();
  const HostBlocks blocks(layout_, block);
  const std::size_t part = blocks.part();
  const Buffer laid = zeros(size * hosts * part, wire);
  blocks.for_each([&](const HostBlocks::Piece& piece) {
    const std::size_t to = (piece.carrier * hosts + piece.host_rank) * part + piece.in_part;
    copy_widened(part_of(call.in, piece.rank * block + piece.in_block, piece.count), part_of(laid, to, piece.count));
  });
  const Buffer slice = alone() ? laid : scratch(hosts * part, wire);
  const Buffer sum = carries() ? scratch(part, wire) : zeros(part, wire);
  const Buffer own = layout_.even() ? sum : scratch(size * part, wire);
  Journey journey;
  if (!alone()) {
    journey.collect = [=, this, op = call.op] { return collect_->reduce_scatter(slice, laid, reducing(op, timeout)); };
    if (!layout_.even()) {
      journey.spread = [=, this] { return spread_->all_gather(own, sum, local_options("from other hosts", timeout)); };
    }
  }
  if (carries()) {
    journey.cross = [=, this, op = call.op](double) {
      return across_->start({Operation::reduce_scatter, sum, slice, op}, timeout);
    };
  }
  const Buffer result = alone() ? sum : own;
  const std::size_t begin = layout_.even() ? 0 : layout_.place * block;
  journey.finish = [=, out = call.out](double) { deliver(part_of(result, begin, block), out); };
  return journey;
}

}  // namespace unisono
