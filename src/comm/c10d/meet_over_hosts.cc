#include <unisono/c10d.h>

#include <algorithm>
#include <chrono>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/c10d/meeting_place.h"
#include "comm/environment.h"
#include "comm/rendezvous.h"

namespace unisono {

std::optional<Meeting> meet_over_hosts(const InitOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const auto environment = read_environment(options, process_environment());
  if (environment.size == 1 || environment.meeting == Environment::Meeting::mpi ||
      !(environment.several_hosts || options.transport == "gloo"))
    return std::nullopt;
  auto place = open_meeting_place(environment, options.start_timeout);
  if (options.store) place.store = options.store;
  const auto left = std::max<std::chrono::nanoseconds>(
      options.start_timeout - (std::chrono::steady_clock::now() - begin), std::chrono::seconds(1));
  const std::string round =
      join_round(*place.store, environment.rank, environment.size, environment.circle + options.prefix, left);
  return Meeting{c10::make_intrusive<c10d::PrefixStore>(round, torch_store(*place.store)), environment.rank,
                 environment.size};
}

}  // namespace unisono
