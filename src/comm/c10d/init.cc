#include <unisono/init.h>

#include <algorithm>
#include <utility>

#include "base/env.h"
#include "base/time_budget.h"
#include "comm/c10d/engines/gloo.h"
#include "comm/c10d/meeting_place.h"
#include "comm/c10d/passing_store.h"
#include "comm/c10d/torch_engine.h"
#include "comm/environment/environment.h"
#include "comm/mpi/mpi_group.h"

namespace unisono {
namespace {

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
  out.prefix = environment.circle + options.prefix;
  return out;
}

// The ranks of each host meet in a file there, which goes again.
std::shared_ptr<ProcessGroup> mpi_over_hosts(const GroupOptions& options) {
  auto file = std::make_shared<PassingStore>(MeetingPlace{});  // of a rank that is alone on its host
  auto group = make_mpi_group_over_hosts(options, [&](const std::string& name, bool first) {
    return file = std::make_shared<PassingStore>(open_host_place(name, first, options.start_timeout));
  });
  file->end(*group);
  return group;
}

std::shared_ptr<ProcessGroup> over_mpi(const Environment& environment, const GroupOptions& options, bool flat) {
  const std::string reason = why_not("mpi", options);
  if (reason.empty()) return flat ? make_group("mpi", options) : mpi_over_hosts(options);
  throw Error(ErrorCode::invalid_argument,
              "unisono::init: the ranks (" + describe(environment) + ") cannot meet: " + reason +
                  ". Or set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there.");
}

// srun --mpi=none, often the default, brings none, and Open MPI would end the process that tries to start it.
bool brought_mpi(const Environment& environment) {
  if (environment.source == Environment::Source::slurm) return env_string("PMIX_RANK") || env_string("PMI_RANK");
  return environment.source != Environment::Source::variables && environment.source != Environment::Source::arguments;
}

// With an address: MPI where its launcher has brought it along, else Gloo.
std::string over_hosts(const Environment& environment, const GroupOptions& options) {
  std::string reasons;
  if (brought_mpi(environment)) {
    const std::string reason = why_not("mpi", options);
    if (reason.empty()) return "mpi";
    reasons = "mpi: " + reason + "; ";
  } else if (environment.source == Environment::Source::slurm) {
    reasons = "mpi: srun was not told to bring one (--mpi=pmix or pmi2); ";
  }
  const std::string reason = why_no_gloo();
  if (reason.empty()) return "gloo";
  throw Error(ErrorCode::invalid_argument,
              "unisono::init: the ranks (" + describe(environment) +
                  ") are on several hosts, and nothing here goes between hosts. " + reasons + "gloo: " + reason +
                  ". Or start them with mpirun, or give DistributedDataParallel a torch group by make_c10d_group().");
}

}  // namespace

std::shared_ptr<ProcessGroup> init(const InitOptions& options) {
  const TimeBudget time(options.start_timeout);
  const auto environment = read_environment(options, process_environment());
  auto group_opts = group_options(options, environment);
  if (options.log) options.log(LogLevel::info, "init: " + describe(environment));
  if (environment.meeting == Environment::Meeting::mpi)
    return over_mpi(environment, group_opts, options.transport == "mpi");
  const bool chooses = environment.several_hosts && options.transport == "auto";
  const std::string transport = chooses ? over_hosts(environment, group_opts) : options.transport;
  if (transport == "mpi") return chooses ? mpi_over_hosts(group_opts) : make_group("mpi", group_opts);
  if (environment.size == 1) return make_group(transport, group_opts);

  auto place = open_meeting_place(environment, options.start_timeout);
  if (options.store) place.store = options.store;
  const bool passing = environment.meeting == Environment::Meeting::job_file;
  const auto file = passing ? std::make_shared<PassingStore>(std::move(place)) : nullptr;
  group_opts.store = passing ? file : place.store;
  group_opts.start_timeout = time.left();
  auto group = chooses ? make_gloo_group_over_hosts(group_opts) : make_group(transport, group_opts);
  if (passing) file->end(*group);
  return group;
}

std::string describe_environment() {
  try {
    return describe(read_environment({}, process_environment()));
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace unisono
