#include "comm/contract.h"
#include "comm/shm/shm_group.h"

namespace unisono::testing {
namespace {

const Transport kShm = {
    .name = "shm",
    .max_ranks = 8,
    .world = [](int, std::chrono::nanoseconds) -> Maker {
      return [](const GroupOptions& o) { return make_shm_group(o); };
    },
    .processes = true,
    .delicate = true,
};

UNISONO_INSTANTIATE_CONTRACT(Shm, kShm);

}  // namespace
}  // namespace unisono::testing
