#include <unisono/c10d.h>
#include <unisono/torch_backend.h>

#include <condition_variable>
#include <mutex>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/contract.h"
#include "comm/emulated_hosts.h"
#include "comm/host_layout.h"
#include "comm/serial/serial_group.h"
#include "comm/shm/shm_group.h"

// Hosts that are none: ranks are threads, neighbours "share a host", and what is between hosts is our own backend once
// more.

namespace unisono::testing {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

c10::intrusive_ptr<c10d::ProcessGroup> torch_group(const StorePtr& store, const std::string& name, int rank, int size,
                                                   std::chrono::nanoseconds timeout) {
  const StorePtr own = c10::make_intrusive<c10d::PrefixStore>(name, store);
  GroupOptions options{.rank = rank, .size = size, .store = make_store(own), .timeout = timeout};
  auto group = c10::make_intrusive<c10d::ProcessGroup>(own, rank, size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM,
                    make_torch_backend(size == 1 ? make_serial_group(options) : make_shm_group(options)));
  group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  return group;
}

// Two ranks on each host.
std::shared_ptr<ProcessGroup> make_hosts(const GroupOptions& options, const StorePtr& store) {
  const auto hosts = hosts_of(options.size);
  const HostLayout layout = layout_of(hosts, options.rank);
  const auto between = [&](const std::string& name) {
    return torch_group(store, name, static_cast<int>(layout.host), static_cast<int>(hosts.size()), options.timeout);
  };
  HostGroups groups;
  groups.all = torch_group(store, "all", options.rank, options.size, options.timeout);
  if (layout.place < layout.narrowest()) groups.across = between("across" + std::to_string(layout.place));
  if (layout.place == 0) groups.leaders = between("leaders");
  const StorePtr own = c10::make_intrusive<c10d::PrefixStore>("host" + std::to_string(layout.host), store);
  return make_hierarchical_group(groups, hosts, make_store(own));
}

const Transport kPairs = {
    .name = "hierarchy",
    .max_ranks = 5,
    .world = [](int, std::chrono::nanoseconds timeout) -> Maker {
      const StorePtr store = c10::make_intrusive<c10d::HashStore>();
      return [store, timeout](const GroupOptions& options) {
        GroupOptions own = options;
        if (own.timeout > timeout) own.timeout = timeout;
        return own.size == 1 ? make_serial_group(own) : make_hosts(own, store);
      };
    },
};

UNISONO_INSTANTIATE_CONTRACT(Hierarchy, kPairs);

// Where it may be rounded at each level a 16-bit sum is still that of the numbers that 16 bits hold.
TEST(Hierarchy, SixteenBitsBetweenHosts) {
  for (int size : {2, 4, 5}) {
    run_ranks(kPairs, size, [size](ProcessGroup& group) {
      std::vector<std::uint16_t> ones(40001, 0x3f80);  // bf16 1.0
      AllReduceOptions options;
      options.may_round = true;
      options.op = ReduceOp::sum;
      group.all_reduce({ones.data(), ones.size(), Dtype::bf16}, options).wait();
      const std::uint16_t sum = size == 2 ? 0x4000 : size == 4 ? 0x4080 : 0x40a0;
      for (std::uint16_t x : ones) require(x == sum, "a sum of ones is " + std::to_string(x));
    });
  }
}

}  // namespace
}  // namespace unisono::testing
