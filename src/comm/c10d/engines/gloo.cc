#include "comm/c10d/engines/gloo.h"

#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/c10d/first_line.h"

// Gloo's headers may be of another year than the Gloo inside torch. They are here for declarations only: whatever
// depends on a layout of Gloo's classes (their members, their virtual functions) must not be named in this file.

namespace unisono {

std::string why_no_gloo() { return ""; }

c10::intrusive_ptr<c10d::Backend> start_gloo(const EngineStart& start) {
  using Gloo = c10d::ProcessGroupGloo;
  c10::intrusive_ptr<Gloo::Options> options;
  try {
    options = Gloo::Options::create_default(start.timeout);
  } catch (const std::exception& e) {
    const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
    throw Error(ErrorCode::invalid_argument,
                "unisono gloo group, rank " + std::to_string(start.rank) + " of " + std::to_string(start.size) +
                    ": Gloo finds no address here (GLOO_SOCKET_IFNAME" +
                    (interface ? std::string("=") + interface : " is not set") + "): " + first_line(e) +
                    ". Set it to an interface of this host that the other hosts reach (`ip address` lists them).");
  }
  return c10::make_intrusive<Gloo>(start.store, start.rank, start.size, std::move(options));
}

}  // namespace unisono
