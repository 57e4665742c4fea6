#include <unisono/round_robin.h>
#include <unisono/torch_backend.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d/engine.h"
#include "comm/contract.h"
#include "comm/issuer/issued_group.h"
#include "comm/serial/serial_group.h"
#include "comm/shm/shm_group.h"

// The adapter over a c10d group whose engine is our own backend over shared memory: both bridges at once, ranks as
// threads, without an engine of torch's (libtorch ships no headers for Gloo; tests/python/test_c10d_group.py has the
// adapter over it).

namespace unisono::testing {
namespace {

std::shared_ptr<ProcessGroup> make_doubly_bridged(const GroupOptions& options,
                                                  const c10::intrusive_ptr<c10d::Store>& store, bool ordered = false) {
  if (options.size == 1) return make_serial_group(options);  // as make_c10d_group does
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, options.rank, options.size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM, make_torch_backend(make_shm_group(options)));
  group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  return std::make_shared<IssuedGroup>(std::make_unique<C10dEngine>(std::move(group), ordered));
}

const Transport kC10d = {
    .name = "c10d",
    .max_ranks = 4,
    .world = [](int, std::chrono::nanoseconds) -> Maker {
      const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
      return [store](const GroupOptions& options) { return make_doubly_bridged(options, store); };
    },
};

const Transport kOrdered = {
    .name = "ordered",
    .max_ranks = 4,
    .world = [](int, std::chrono::nanoseconds) -> Maker {
      const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
      return [store](const GroupOptions& options) { return make_doubly_bridged(options, store, true); };
    },
};

const Transport kRoundRobin = {
    .name = "round_robin_of_2_c10d",
    .max_ranks = 3,
    .world = [](int, std::chrono::nanoseconds) -> Maker {
      const c10::intrusive_ptr<c10d::Store> stores[] = {c10::make_intrusive<c10d::HashStore>(),
                                                        c10::make_intrusive<c10d::HashStore>()};
      return [one = stores[0], two = stores[1]](GroupOptions options) {
        auto first = make_doubly_bridged(options, one);
        options.prefix += "/second";
        return make_round_robin_group({std::move(first), make_doubly_bridged(options, two)});
      };
    },
    .mixes_places = false,
};

UNISONO_INSTANTIATE_CONTRACT(C10d, kC10d);
UNISONO_INSTANTIATE_CONTRACT(Ordered, kOrdered);
UNISONO_INSTANTIATE_CONTRACT(RoundRobinOfC10d, kRoundRobin);

}  // namespace
}  // namespace unisono::testing
