#include "comm/environment/environment.h"

#include <cstdlib>
#include <string>

#include "base/sha256.h"
#include "comm/environment/launcher.h"
#include "comm/environment/slurm.h"

namespace unisono {
namespace {

void read_identity(const EnvironmentReader& env, const InitOptions& options, Environment& out) {
  const bool all_given = options.rank >= 0 && options.size >= 0;
  const auto found = all_given ? std::nullopt : find_launcher(env);
  if (found) {
    out.source = found->launcher->source;
    out.rank = found->ranks.rank;
    out.size = found->ranks.size;
    out.evidence = env.shown(found->launcher->rank) + " " + env.shown(found->launcher->size);
  } else if (env.has("SLURM_PROCID")) {
    out.evidence = env.shown("SLURM_PROCID") + " " + env.shown("SLURM_NTASKS");
  }
  if (options.rank < 0 && options.size < 0) return;

  const std::string given =
      "InitOptions{rank=" + std::to_string(options.rank) + ", size=" + std::to_string(options.size) + "}";
  if (!found && !all_given)
    refuse_start(given + ": one without the other, and the environment tells neither. Give both, or neither.");
  if (options.rank >= 0) out.rank = options.rank;
  if (options.size >= 0) out.size = options.size;
  out.evidence = found ? given + " over " + out.evidence : given;
  out.source = Environment::Source::arguments;
  check_range({out.rank, out.size}, out.evidence);
}

void read_tcp(const EnvironmentReader& env, Environment& out) {
  if (!env.has("MASTER_ADDR") || !env.has("MASTER_PORT"))
    refuse_start(env.shown("MASTER_ADDR") + ", " + env.shown("MASTER_PORT") +
                 ": one without the other. Set both (e.g. MASTER_ADDR=127.0.0.1 MASTER_PORT=29500).");
  out.host = *env.text("MASTER_ADDR");
  out.port = env.number("MASTER_PORT");
  if (out.port < 1 || out.port > 65535) refuse_start(env.shown("MASTER_PORT") + " is no TCP port (1 to 65535).");
  const bool agent = env.text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  out.meeting = agent ? Environment::Meeting::agent_store : Environment::Meeting::tcp;
  if (agent && env.has("TORCHELASTIC_RESTART_COUNT")) out.attempt = env.number("TORCHELASTIC_RESTART_COUNT");
  out.evidence += " " + env.shown("MASTER_ADDR") + " " + env.shown("MASTER_PORT");
}

bool may_be_on_several_hosts(const EnvironmentReader& env, const InitOptions& options, const Environment& ranks) {
  if (ranks.size == 1) return false;
  if (env.has("UNISONO_HOST_PART") && (options.transport == "auto" || options.transport == "gloo")) return true;
  return launcher_spans_hosts(env, ranks.source, {ranks.rank, ranks.size});
}

// False where Slurm does not tell enough.
bool read_slurm_nodes(const EnvironmentReader& env, Environment& out) {
  const auto address = slurm_address(env);
  if (!address) return false;
  out.host = address->host;
  out.port = address->port;
  out.job = job_name(env);
  out.meeting = Environment::Meeting::tcp;
  out.evidence += " " + address->evidence;
  return true;
}

void read_job(const EnvironmentReader& env, const InitOptions& options, const Launcher& launcher, Environment& out) {
  if (out.several_hosts && launcher.source == Environment::Source::slurm && options.transport != "mpi" &&
      read_slurm_nodes(env, out))
    return;
  if (out.several_hosts && options.transport == "auto") {
    out.meeting = Environment::Meeting::mpi;
    return;
  }
  if (out.several_hosts)
    refuse_start(out.evidence + " from " + launcher.name +
                 " spans several hosts and tells no address. Set MASTER_ADDR to rank 0's " +
                 "host and MASTER_PORT to a free port there, or use the transport mpi.");
  out.meeting = Environment::Meeting::job_file;
  out.job = job_name(env);
}

void read_meeting(const EnvironmentReader& env, const InitOptions& options, Environment& out) {
  if (options.transport == "mpi") {
    out.meeting = Environment::Meeting::mpi;
    return;
  }
  const Launcher* launcher = launcher_of(out.source);
  out.several_hosts = may_be_on_several_hosts(env, options, out);
  if (options.store) {
    out.meeting = Environment::Meeting::given;
    return;
  }
  if (out.size == 1) return;
  if (auto store = env.text("UNISONO_STORE")) {
    if (!store->starts_with("file:") || store->size() == 5)
      refuse_start("UNISONO_STORE=" + *store + " is not understood. Write UNISONO_STORE=file:PATH.");
    out.meeting = Environment::Meeting::file;
    out.path = store->substr(5);
    out.evidence += " " + env.shown("UNISONO_STORE");
    return;
  }
  if (env.has("MASTER_ADDR") || env.has("MASTER_PORT")) return read_tcp(env, out);
  if (launcher && launcher->source != Environment::Source::variables) return read_job(env, options, *launcher, out);
  refuse_start(out.evidence +
               ", but MASTER_ADDR, MASTER_PORT and UNISONO_STORE are not set: the ranks have no place to meet. " +
               "Use `unisono run -n " + std::to_string(out.size) +
               " ...`, or set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a " + "free port, or UNISONO_STORE=file:PATH.");
}

// Ranks with another job or secret use other keys of the store, and never meet. Nobody reads a secret from a key.
std::string circle_of(const EnvironmentReader& env) {
  std::string circle;
  if (const auto job = env.text("UNISONO_JOB")) circle = "job " + *job + "/";
  if (const auto secret = env.text("UNISONO_SECRET")) {
    Sha256 hash;
    const std::string salted = "unisono secret " + *secret;
    hash.update(salted.data(), salted.size());
    circle += "secret " + hash.hex() + "/";
  }
  return circle;
}

}  // namespace

Lookup process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  };
}

Environment read_environment(const InitOptions& options, const Lookup& lookup) {
  const EnvironmentReader env(lookup);
  Environment out;
  read_identity(env, options, out);
  read_meeting(env, options, out);
  out.circle = (out.meeting == Environment::Meeting::tcp && !out.job.empty() ? out.job + "/" : "") + circle_of(env);
  return out;
}

std::string describe(const Environment& environment) {
  if (environment.source == Environment::Source::none && environment.meeting == Environment::Meeting::mpi)
    return "rank and size are MPI's to tell";
  if (environment.source == Environment::Source::none && !environment.evidence.empty())
    return "a world of one: " + environment.evidence + " are of a Slurm job, but this is no task that srun has started";
  if (environment.source == Environment::Source::none)
    return "a world of one: no RANK, OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID in the environment";
  const Launcher* launcher = launcher_of(environment.source);
  std::string out = environment.evidence + " from " + (launcher ? launcher->name : "the arguments");
  switch (environment.meeting) {
    case Environment::Meeting::none:
      return out + ", no rendezvous needed";
    case Environment::Meeting::given:
      return out + ", rendezvous in the store that was given";
    case Environment::Meeting::agent_store:
      return out + ", rendezvous in torchrun's store";
    case Environment::Meeting::tcp:
      return out + ", rendezvous in a store that rank 0 hosts";
    case Environment::Meeting::file:
      return out + ", rendezvous in that file";
    case Environment::Meeting::job_file:
      return out + ", rendezvous in a private file of " + environment.job;
    case Environment::Meeting::mpi:
      return out + ", rendezvous by MPI";
  }
  return out;
}

}  // namespace unisono
