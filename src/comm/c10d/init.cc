#include <algorithm>
#include <utility>

#include <unisono/init.h>

#include "comm/c10d/meeting_place.h"
#include "comm/environment.h"
#include "comm/rendezvous.h"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;

std::string why_not(const std::string& transport, const GroupOptions& options) {
  for (const auto& candidate : viable_transports(options))
    if (candidate.transport == transport) return candidate.reason;
  return "this build has no transport " + transport;
}

GroupOptions group_options(const InitOptions& options, const Environment& environment) {
  GroupOptions out;
  out.rank = environment.rank;
  out.size = environment.size;
  out.timeout = options.timeout;
  out.start_timeout = options.start_timeout;
  out.log = options.log;
  return out;
}

std::shared_ptr<ProcessGroup> over_mpi(const Environment& environment, const GroupOptions& options) {
  const std::string reason = why_not("mpi", options);
  if (reason.empty()) return make_group("mpi", options);
  throw Error(ErrorCode::invalid_argument, "unisono::init: the ranks (" + describe(environment) + ") cannot meet: " + reason +
                                               ". Or set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there.");
}

// The store must outlive the group: rank 0 may host it, and a peer may still be reading its last key.
struct GroupWithStore {
  std::shared_ptr<Store> store;
  std::shared_ptr<ProcessGroup> group;
};

}  // namespace

std::shared_ptr<ProcessGroup> init(const InitOptions& options) {
  const auto begin = Clock::now();
  const auto environment = read_environment(options, process_environment());
  auto group_opts = group_options(options, environment);
  if (options.log) options.log(LogLevel::info, "init: " + describe(environment));
  if (environment.meeting == Environment::Meeting::mpi) return over_mpi(environment, group_opts);
  if (environment.size == 1) return make_group(options.transport, group_opts);

  auto place = open_meeting_place(environment, options.start_timeout);
  if (options.store) place.store = options.store;
  const auto left = [&] {
    return std::max<std::chrono::nanoseconds>(options.start_timeout - (Clock::now() - begin), std::chrono::nanoseconds(0));
  };
  group_opts.store = place.store;
  group_opts.prefix = join_round(*place.store, environment.rank, environment.size, "unisono", left()) + "/group";
  group_opts.start_timeout = std::max<std::chrono::nanoseconds>(left(), std::chrono::seconds(1));
  auto group = make_group(options.transport, group_opts);
  if (environment.meeting == Environment::Meeting::job_file) {
    group->barrier().wait();  // nobody reads the file any more when rank 0 removes it
    place.cleanup.reset();
  }
  auto kept = std::make_shared<GroupWithStore>(GroupWithStore{std::move(place.store), std::move(group)});
  return {kept, kept->group.get()};
}

std::string describe_environment() {
  try {
    return describe(read_environment({}, process_environment()));
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace unisono
