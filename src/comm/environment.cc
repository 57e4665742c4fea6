#include "comm/environment.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <iterator>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/sha256.h"
#include "comm/process_identity.h"

namespace unisono {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "unisono::init: " + what);
}

// Reads variables and remembers what it has seen, so that every message can show it.
class Reader {
 public:
  explicit Reader(const Lookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = lookup_(name);
    if (value && value->empty()) value.reset();
    return value;
  }
  bool has(const std::string& name) const { return text(name).has_value(); }

  std::string shown(const std::string& name) const {
    auto value = text(name);
    return value ? name + "=" + *value : name + " (not set)";
  }

  template <class Number = int>
  Number number(const std::string& name) const {
    const std::string value = text(name).value_or("");
    Number out = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
    if (error != std::errc{} || end != value.data() + value.size())
      refuse(name + "='" + value + "' is not a whole number. Set it to one, or unset it.");
    return out;
  }

 private:
  const Lookup& lookup_;
};

struct Launcher {
  Environment::Source source;
  const char* rank;
  const char* size;
  const char* local_size;  // how many of the ranks are on this host; null where not told
  const char* name;
};

constexpr Launcher kLaunchers[] = {
    {Environment::Source::variables, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "the environment"},
    {Environment::Source::open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "mpirun (Open MPI)"},
    {Environment::Source::mpich, "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "mpiexec (MPICH)"},
    {Environment::Source::slurm, "SLURM_PROCID", "SLURM_NTASKS", nullptr, "srun"},
};

const Launcher* launcher_of(Environment::Source source) {
  for (const auto& launcher : kLaunchers)
    if (launcher.source == source) return &launcher;
  return nullptr;
}

void check_range(int rank, int size, const std::string& evidence) {
  if (size < 1) refuse(evidence + ": the world size must be at least 1.");
  if (rank < 0 || rank >= size)
    refuse(evidence + ": the rank must be in [0, " + std::to_string(size) + "). Start " + std::to_string(size) +
           " processes with ranks 0 to " + std::to_string(size - 1) + ".");
}

// Slurm tells the allocation's number of tasks to processes that are none of them: a shell of salloc, a batch script
// (as rank 0 of no step), the one task of an interactive step.
bool is_slurm_task(const Reader& env) {
  if (!env.has("SLURM_PROCID")) return false;
  if (env.has("SLURM_STEP_NUM_TASKS")) return env.text("SLURM_STEP_NUM_TASKS") == env.text("SLURM_NTASKS");
  return env.has("SLURM_STEP_ID") || env.text("ENVIRONMENT") != "BATCH";
}

// Reads rank and size of one launcher; empty when it set neither.
std::optional<std::pair<int, int>> read_launcher(const Reader& env, const Launcher& launcher) {
  const bool rank = env.has(launcher.rank);
  const bool size = env.has(launcher.size);
  if (!rank && !size) return std::nullopt;
  if (launcher.source == Environment::Source::slurm && !is_slurm_task(env)) return std::nullopt;
  const std::string evidence = env.shown(launcher.rank) + ", " + env.shown(launcher.size);
  if (rank != size)
    refuse(evidence + ": one without the other. Set both, or neither for a world of one; " +
           "`unisono run -n N ...` or torchrun set them for you.");
  const std::pair<int, int> out{env.number(launcher.rank), env.number(launcher.size)};
  check_range(out.first, out.second, evidence);
  return out;
}

// RANK left over in a shell from another run would silently win over mpirun; torchrun started by mpirun or srun is fine.
void check_contradiction(const Reader& env, const Launcher& used, std::pair<int, int> found) {
  if (used.source != Environment::Source::variables || env.has("TORCHELASTIC_RUN_ID")) return;
  for (const auto& other : kLaunchers) {
    if (other.source != Environment::Source::open_mpi && other.source != Environment::Source::mpich) continue;
    const auto theirs = read_launcher(env, other);
    if (theirs && *theirs != found)
      refuse(env.shown(used.rank) + " " + env.shown(used.size) + " contradict " + env.shown(other.rank) + " " +
             env.shown(other.size) + " from " + other.name + ". Unset " + used.rank + " and " + used.size +
             ", or make them agree.");
  }
}

// srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE beside its own variables, and only its own tell the hosts.
bool is_srun_pmi(const Reader& env, const Launcher& launcher) {
  return launcher.source == Environment::Source::mpich && is_slurm_task(env) &&
         env.text("SLURM_PROCID") == env.text(launcher.rank) && env.text("SLURM_NTASKS") == env.text(launcher.size);
}

void read_identity(const Reader& env, const InitOptions& options, Environment& out) {
  std::optional<std::pair<int, int>> found;
  const bool all_given = options.rank >= 0 && options.size >= 0;
  if (!all_given) {
    for (const auto& launcher : kLaunchers) {
      found = read_launcher(env, launcher);
      if (!found || is_srun_pmi(env, launcher)) continue;
      check_contradiction(env, launcher, *found);
      out.source = launcher.source;
      out.evidence = env.shown(launcher.rank) + " " + env.shown(launcher.size);
      break;
    }
  }
  if (found) std::tie(out.rank, out.size) = *found;
  if (!found && env.has("SLURM_PROCID")) out.evidence = env.shown("SLURM_PROCID") + " " + env.shown("SLURM_NTASKS");
  if (options.rank < 0 && options.size < 0) return;

  const std::string given =
      "InitOptions{rank=" + std::to_string(options.rank) + ", size=" + std::to_string(options.size) + "}";
  if (!found && !all_given)
    refuse(given + ": one without the other, and the environment tells neither. Give both, or neither.");
  if (options.rank >= 0) out.rank = options.rank;
  if (options.size >= 0) out.size = options.size;
  out.evidence = found ? given + " over " + out.evidence : given;
  out.source = Environment::Source::arguments;
  check_range(out.rank, out.size, out.evidence);
}

// The launcher's own name of the job; it is the same on all ranks of the job and on no others.
std::string job_name(const Reader& env) {
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})
    if (auto value = env.text(name)) return "job-" + *value;
  if (auto job = env.text("SLURM_JOB_ID")) return "slurm-" + *job + "." + env.text("SLURM_STEP_ID").value_or("0");
  return "parent-" + parent_identity();  // MPICH's proxy tells no name, but it is the parent of all local ranks
}

void read_tcp(const Reader& env, Environment& out) {
  if (!env.has("MASTER_ADDR") || !env.has("MASTER_PORT"))
    refuse(env.shown("MASTER_ADDR") + ", " + env.shown("MASTER_PORT") +
           ": one without the other. Set both (e.g. MASTER_ADDR=127.0.0.1 MASTER_PORT=29500).");
  out.host = *env.text("MASTER_ADDR");
  out.port = env.number("MASTER_PORT");
  if (out.port < 1 || out.port > 65535) refuse(env.shown("MASTER_PORT") + " is no TCP port (1 to 65535).");
  const bool agent = env.text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  out.meeting = agent ? Environment::Meeting::agent_store : Environment::Meeting::tcp;
  if (agent && env.has("TORCHELASTIC_RESTART_COUNT")) out.attempt = env.number("TORCHELASTIC_RESTART_COUNT");
  out.evidence += " " + env.shown("MASTER_ADDR") + " " + env.shown("MASTER_PORT");
}

// Whether this launcher tells of these ranks.
bool tells_of(const Reader& env, const Launcher& launcher, const Environment& ranks) {
  if (ranks.source != Environment::Source::arguments) return launcher.source == ranks.source;
  if (launcher.source == Environment::Source::slurm && !is_slurm_task(env)) return false;
  return env.text(launcher.rank) == std::to_string(ranks.rank) &&
         env.text(launcher.size) == std::to_string(ranks.size) && !is_srun_pmi(env, launcher);
}

bool spans_hosts(const Reader& env, const Launcher& launcher, int size) {
  return (launcher.local_size && env.has(launcher.local_size) && env.number(launcher.local_size) < size) ||
         (launcher.source == Environment::Source::slurm && env.has("SLURM_NNODES") && env.number("SLURM_NNODES") > 1);
}

bool may_be_on_several_hosts(const Reader& env, const InitOptions& options, const Environment& ranks) {
  if (ranks.size == 1) return false;
  if (env.has("UNISONO_HOST_PART") && (options.transport == "auto" || options.transport == "gloo")) return true;
  return std::any_of(std::begin(kLaunchers), std::end(kLaunchers), [&](const Launcher& launcher) {
    return tells_of(env, launcher, ranks) && spans_hosts(env, launcher, ranks.size);
  });
}

// "node[003-005,9],login" is node003, node004, ...
std::string first_node(const std::string& list) {
  const auto end = list.find_first_of("[,");
  std::string name = list.substr(0, end);
  if (end == std::string::npos || list[end] == ',') return name;
  const auto stop = list.find_first_of("-,]", end + 1);
  return name + list.substr(end + 1, stop - end - 1);
}

// The same on all nodes; steps of one job have ports of their own, and so have jobs with numbers nearby. Below 32768,
// from where on Linux hands ports to whoever asks for any, as srun does.
int slurm_port(const Reader& env) {
  const auto job = env.number<unsigned>("SLURM_JOB_ID");
  const auto step = env.has("SLURM_STEP_ID") ? env.number<unsigned>("SLURM_STEP_ID") : 0;
  return 10'000 + static_cast<int>((job + 7919ULL * step) % 20'000);
}

// Slurm sorts the list of nodes; where tasks were laid out by hand or are of several components, rank 0 may be on any.
bool rank0_is_on_first_node(const Reader& env) {
  const bool arbitrary = env.text("SLURM_DISTRIBUTION").value_or("").starts_with("arbitrary");
  if (!arbitrary && !env.has("SLURM_HET_SIZE")) return true;
  if (env.has("PMIX_RANK") || env.has("PMI_RANK")) return false;  // MPI needs no address
  refuse(env.shown(arbitrary ? "SLURM_DISTRIBUTION" : "SLURM_HET_SIZE") +
         ": on which node rank 0 runs is not told. Set MASTER_ADDR to that node and MASTER_PORT to a free port there, "
         "or start an MPI with srun --mpi=pmix (or pmi2).");
}

bool read_slurm_nodes(const Reader& env, Environment& out) {
  const char* variable = env.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  if (!env.has(variable) || !env.has("SLURM_JOB_ID") || !rank0_is_on_first_node(env)) return false;
  out.host = first_node(*env.text(variable));
  out.port = slurm_port(env);
  out.job = job_name(env);
  out.meeting = Environment::Meeting::tcp;
  out.evidence += " " + env.shown(variable) + " " + env.shown("SLURM_JOB_ID");
  return true;
}

void read_job(const Reader& env, const InitOptions& options, const Launcher& launcher, Environment& out) {
  if (out.several_hosts && launcher.source == Environment::Source::slurm && options.transport != "mpi" &&
      read_slurm_nodes(env, out))
    return;
  if (out.several_hosts && options.transport == "auto") {
    out.meeting = Environment::Meeting::mpi;
    return;
  }
  if (out.several_hosts)
    refuse(out.evidence + " from " + launcher.name +
           " spans several hosts and tells no address. Set MASTER_ADDR to rank 0's " +
           "host and MASTER_PORT to a free port there, or use the transport mpi.");
  out.meeting = Environment::Meeting::job_file;
  out.job = job_name(env);
}

void read_meeting(const Reader& env, const InitOptions& options, Environment& out) {
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
      refuse("UNISONO_STORE=" + *store + " is not understood. Write UNISONO_STORE=file:PATH.");
    out.meeting = Environment::Meeting::file;
    out.path = store->substr(5);
    out.evidence += " " + env.shown("UNISONO_STORE");
    return;
  }
  if (env.has("MASTER_ADDR") || env.has("MASTER_PORT")) return read_tcp(env, out);
  if (launcher && launcher->source != Environment::Source::variables) return read_job(env, options, *launcher, out);
  refuse(out.evidence +
         ", but MASTER_ADDR, MASTER_PORT and UNISONO_STORE are not set: the ranks have no place to meet. " +
         "Use `unisono run -n " + std::to_string(out.size) +
         " ...`, or set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a " + "free port, or UNISONO_STORE=file:PATH.");
}

// Ranks with another job or secret use other keys of the store, and never meet. Nobody reads a secret from a key.
std::string circle_of(const Reader& env) {
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
  const Reader env(lookup);
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
