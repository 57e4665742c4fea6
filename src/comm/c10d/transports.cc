#include "comm/c10d/engines/gloo.h"
#include "comm/c10d/engines/nccl.h"
#include "comm/c10d/torch_engine.h"
#include "comm/transport.h"

namespace unisono {
namespace {

constexpr TorchEngine kGloo{
    "gloo", c10::kCPU, c10d::ProcessGroup::GLOO, start_gloo,
    "Has another rank failed first? Else every host must reach every other at the address that Gloo takes there: set "
    "GLOO_SOCKET_IFNAME on each to the interface that they share."};
constexpr TorchEngine kNccl{
    "nccl", c10::kCUDA, c10d::ProcessGroup::NCCL, start_nccl,
    "Has another rank failed first? NCCL_DEBUG=INFO tells more; NCCL_SOCKET_IFNAME names the interface."};

std::string why_not(const GroupOptions& options, std::string reason) {
  if (reason.empty() && options.size > 1 && !options.store)
    return "a group of several ranks needs a store to meet in (GroupOptions::store)";
  return reason;
}

// A world of one needs no engine, unless for memory that only an engine reaches.
constexpr Transport kTransports[] = {
    {"gloo", [](const GroupOptions& o) { return o.size == 1 ? std::string() : why_not(o, why_no_gloo()); },
     [](const GroupOptions& o) { return o.size == 1 ? make_group("serial", o) : make_engine_group(kGloo, o); }},
    {"nccl", [](const GroupOptions& o) { return why_not(o, why_no_nccl()); },
     [](const GroupOptions& o) { return make_engine_group(kNccl, o); }, false},
};

}  // namespace

std::span<const Transport> torch_transports() { return kTransports; }

std::shared_ptr<ProcessGroup> make_gloo_group_over_hosts(const GroupOptions& options) {
  return make_engine_group_over_hosts(kGloo, options);
}

}  // namespace unisono
