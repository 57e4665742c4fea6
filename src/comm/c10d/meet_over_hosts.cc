#include <unisono/c10d.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/time_budget.h"
#include "comm/c10d/meeting_place.h"
#include "comm/environment/environment.h"
#include "comm/rendezvous.h"

namespace unisono {

std::optional<Meeting> meet_over_hosts(const InitOptions& options) {
  const TimeBudget time(options.start_timeout);
  const auto environment = read_environment(options, process_environment());
  if (environment.size == 1 || environment.meeting == Environment::Meeting::mpi ||
      !(environment.several_hosts || options.transport == "gloo"))
    return std::nullopt;
  auto place = open_meeting_place(environment, options.start_timeout);
  if (options.store) place.store = options.store;
  const std::string round =
      join_round(*place.store, environment.rank, environment.size, environment.circle + options.prefix, time.left());
  return Meeting{c10::make_intrusive<c10d::PrefixStore>(round, torch_store(*place.store)), environment.rank,
                 environment.size};
}

}  // namespace unisono
