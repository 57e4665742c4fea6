#include "comm/contract.h"
#include "comm/fake/fake_group.h"

namespace unisono::testing {
namespace {

const Transport kFake = {
    .name = "fake",
    .world = [](int size, std::chrono::nanoseconds timeout) -> Maker {
      auto world = std::make_shared<FakeWorld>(size, timeout);
      return [world](const GroupOptions& options) { return world->group(options.rank); };
    },
};

UNISONO_INSTANTIATE_CONTRACT(Fake, kFake);

}  // namespace
}  // namespace unisono::testing
