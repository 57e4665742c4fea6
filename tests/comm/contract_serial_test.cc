#include "comm/contract.h"
#include "comm/serial/serial_group.h"

namespace unisono::testing {
namespace {

const Transport kSerial = {
    .name = "serial",
    .max_ranks = 1,
    .world = [](int, std::chrono::nanoseconds) -> Maker { return make_serial_group; },
};

UNISONO_INSTANTIATE_CONTRACT(Serial, kSerial);

}  // namespace
}  // namespace unisono::testing
