#include <unisono/c10d.h>
#include <unisono/torch_backend.h>

#include <condition_variable>
#include <mutex>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/contract.h"
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

// The layouts here are those in which hosts are subtrees of the balanced tree, so that sums have the reference's bits.
// `first` ranks on the first host, two on each other host (or what is left).
std::shared_ptr<ProcessGroup> make_hosts(const GroupOptions& options, const StorePtr& store, int first) {
  if (options.size <= first) return make_serial_group(options);
  std::vector<int> sizes{first};
  for (int left = options.size - first; left > 0; left -= 2) sizes.push_back(std::min(2, left));
  HostPlace place;
  place.hosts = static_cast<int>(sizes.size());
  place.carriers = *std::min_element(sizes.begin(), sizes.end());
  int host = 0, begin = 0;
  while (options.rank >= begin + sizes[static_cast<std::size_t>(host)])
    begin += sizes[static_cast<std::size_t>(host++)];
  place.local_rank = options.rank - begin;
  place.local_size = sizes[static_cast<std::size_t>(host)];
  auto flat = torch_group(store, "flat", options.rank, options.size, options.timeout);
  c10::intrusive_ptr<c10d::ProcessGroup> across;
  if (place.local_rank < place.carriers) {
    across = torch_group(store, "across" + std::to_string(place.local_rank), host, place.hosts, options.timeout);
  }
  const StorePtr own = c10::make_intrusive<c10d::PrefixStore>("host" + std::to_string(host), store);
  return make_hierarchical_group(std::move(flat), std::move(across), place, make_store(own));
}

Transport hosts(const std::string& name, int first) {
  return {
      .name = name,
      .max_ranks = 5,
      .world = [first](int size, std::chrono::nanoseconds timeout) -> Maker {
        const StorePtr store = c10::make_intrusive<c10d::HashStore>();
        // Where all ranks fit onto the first host there is nothing between hosts: then it is smaller.
        const int least = size <= 2 ? 1 : size <= first ? 2 : first;
        return [store, least, timeout](const GroupOptions& options) {
          GroupOptions own = options;
          if (own.timeout > timeout) own.timeout = timeout;
          return own.size == 1 ? make_serial_group(own) : make_hosts(own, store, least);
        };
      },
  };
}

const Transport kPairs = hosts("hierarchy", 2), kUneven = hosts("hierarchy_uneven", 4);

UNISONO_INSTANTIATE_CONTRACT(Hierarchy, kPairs);
UNISONO_INSTANTIATE_CONTRACT(HierarchyUneven, kUneven);

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
