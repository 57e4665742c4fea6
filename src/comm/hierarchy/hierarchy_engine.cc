#include "comm/hierarchy/hierarchy_engine.h"

#include <unisono/regroup.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace unisono {
namespace {

EngineInfo info_of(const Engine& flat) {
  EngineInfo info = flat.info();
  info.name = "hierarchy/" + info.name;
  return info;
}

}  // namespace

HierarchyEngine::HierarchyEngine(HostLayout layout, HierarchyParts parts)
    : Engine(info_of(*parts.flat)),
      layout_(std::move(layout)),
      flat_(std::move(parts.flat)),
      across_(std::move(parts.across)),
      leaders_(std::move(parts.leaders)),
      collect_(std::move(parts.collect)),
      spread_(std::move(parts.spread)),
      headers_(std::move(parts.headers)),
      ordered_(parts.ordered) {
  const bool fits =
      !across_ || static_cast<std::size_t>(across_->info().rank) == layout_.position(layout_.place, layout_.host);
  const bool ways = fits && carries() == (across_ != nullptr) && (layout_.place == 0) == (leaders_ != nullptr) &&
                    alone() == (collect_ == nullptr);
  if (layout_.hosts.size() < 2 || !ways || layout_.rank != info().rank ||
      layout_.ranks() != static_cast<std::size_t>(info().size)) {
    throw Error(
        ErrorCode::invalid_argument,
        "a hierarchy of " + std::to_string(layout_.hosts.size()) + " hosts and " + std::to_string(layout_.ranks()) +
            " ranks over " + info().name + ", rank " + std::to_string(info().rank) + " of " +
            std::to_string(info().size) + ", the " + std::to_string(layout_.place) + "th of " +
            std::to_string(layout_.own().size()) + " on its host, of which " + std::to_string(carriers()) + " carry: " +
            (across_ ? "with" : "without") + " a group across hosts and " + (leaders_ ? "with" : "without") +
            " one for headers. There must be two hosts or more; the first `carriers` ranks of a host have a group "
            "across, with ranks in the order of theirs, and the first rank one for headers");
  }
}

std::vector<DataCall> HierarchyEngine::parts_of(const DataCall& call) const {
  if (call.out.device.kind != Device::Kind::cpu) return flat_->parts_of(call);
  if (call.operation != Operation::all_reduce && call.operation != Operation::broadcast) return {call};
  constexpr std::size_t kPart = 8 << 20;  // bytes: long enough for a link, short beside a large bucket
  const std::size_t multiple = 16 * carriers();
  return split(call, kPart / size_of(call.out.dtype) / multiple * multiple);
}

EngineOp HierarchyEngine::start(const DataCall& call, Milliseconds timeout) {
  if (call.out.device.kind != Device::Kind::cpu) return flat_->start(call, timeout);
  switch (call.operation) {
    case Operation::all_reduce:
      return begin(all_reduce(call, timeout));
    case Operation::broadcast:
      return begin(broadcast(call, timeout));
    case Operation::all_gather:
      return begin(all_gather(call, timeout));
    case Operation::reduce_scatter:
      return begin(reduce_scatter(call, timeout));
    default:
      return flat_->start(call, timeout);
  }
}

// Host by host, one behind the other, each as wide as the widest.
EngineOp HierarchyEngine::gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) {
  const std::size_t host_bytes = layout_.widest() * bytes;
  const Buffer own = zeros(host_bytes, Dtype::u8);
  const Buffer all = scratch(layout_.hosts.size() * host_bytes, Dtype::u8);
  const Buffer mine = part_of(own, layout_.place * bytes, bytes);
  std::memcpy(mine.data, block, bytes);
  const auto cross = [=, this](double) {
    if (!leaders_) return spread_headers(all, host_bytes, bytes, timeout);
    EngineOp op = leaders_->gather_bytes(own.data, host_bytes, timeout);
    op.then = [this, all, host_bytes, bytes, timeout, gathered = op.gathered](double) {
      const auto got = gathered();
      std::memcpy(all.data, got.data(), got.size());
      return spread_headers(all, host_bytes, bytes, timeout);
    };
    return op;
  };
  if (alone()) return cross(1);
  EngineOp op = local(
      headers_->all_gather(part_of(own, 0, layout_.own().size() * bytes), mine, local_options("headers", timeout)));
  op.then = cross;
  return op;
}

EngineOp HierarchyEngine::spread_headers(Buffer all, std::size_t host_bytes, std::size_t bytes,
                                         Milliseconds timeout) const {
  EngineOp op = local(alone() ? Work() : headers_->broadcast(all, 0, local_options("headers of all hosts", timeout)));
  op.gathered = [this, all, host_bytes, bytes] {
    std::vector<std::uint8_t> out(layout_.ranks() * bytes);
    for (std::size_t host = 0; host < layout_.hosts.size(); ++host) {
      const auto* from = static_cast<const std::uint8_t*>(all.data) + host * host_bytes;
      for (const int rank : layout_.hosts[host]) {
        std::memcpy(out.data() + static_cast<std::size_t>(rank) * bytes, from, bytes);
        from += bytes;
      }
    }
    return out;
  };
  return op;
}

std::vector<int> HierarchyEngine::lost() const {
  std::vector<int> out = flat_->lost();
  if (collect_ && out.empty()) {
    for (const int local : lost_ranks(*collect_)) out.push_back(layout_.own()[static_cast<std::size_t>(local)]);
  }
  return out;
}

void HierarchyEngine::abort(const Error& cause) {
  for (const auto& group : {collect_, spread_, headers_})
    if (group) group->abort(cause);
  for (auto* engine : {flat_.get(), across_.get(), leaders_.get()})
    if (engine) engine->abort(cause);
}

}  // namespace unisono
