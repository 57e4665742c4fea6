#include "comm/environment/launcher.h"

#include <algorithm>
#include <iterator>

#include "comm/environment/slurm.h"
#include "comm/process_identity.h"

namespace unisono {
namespace {

using Source = Environment::Source;

constexpr Launcher kLaunchers[] = {
    {Source::variables, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "the environment"},
    {Source::open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "mpirun (Open MPI)"},
    {Source::mpich, "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "mpiexec (MPICH)"},
    {Source::slurm, "SLURM_PROCID", "SLURM_NTASKS", nullptr, "srun"},
};

// Empty when it set neither.
std::optional<RankAndSize> read_launcher(const EnvironmentReader& env, const Launcher& launcher) {
  const bool rank = env.has(launcher.rank);
  const bool size = env.has(launcher.size);
  if (!rank && !size) return std::nullopt;
  if (launcher.source == Source::slurm && !is_slurm_task(env)) return std::nullopt;
  const std::string evidence = env.shown(launcher.rank) + ", " + env.shown(launcher.size);
  if (rank != size)
    refuse_start(evidence + ": one without the other. Set both, or neither for a world of one; " +
                 "`unisono run -n N ...` or torchrun set them for you.");
  const RankAndSize out{env.number(launcher.rank), env.number(launcher.size)};
  check_range(out, evidence);
  return out;
}

// RANK left over in a shell from another run would silently win over mpirun; torchrun started by mpirun or srun is
// fine.
void check_contradiction(const EnvironmentReader& env, const Launcher& used, RankAndSize found) {
  if (used.source != Source::variables || env.has("TORCHELASTIC_RUN_ID")) return;
  for (const auto& other : kLaunchers) {
    if (other.source != Source::open_mpi && other.source != Source::mpich) continue;
    const auto theirs = read_launcher(env, other);
    if (theirs && *theirs != found)
      refuse_start(env.shown(used.rank) + " " + env.shown(used.size) + " contradict " + env.shown(other.rank) + " " +
                   env.shown(other.size) + " from " + other.name + ". Unset " + used.rank + " and " + used.size +
                   ", or make them agree.");
  }
}

// srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE beside its own variables, and only its own tell the hosts.
bool is_srun_pmi(const EnvironmentReader& env, const Launcher& launcher) {
  return launcher.source == Source::mpich && is_slurm_task(env) &&
         env.text("SLURM_PROCID") == env.text(launcher.rank) && env.text("SLURM_NTASKS") == env.text(launcher.size);
}

bool tells_of(const EnvironmentReader& env, const Launcher& launcher, Source source, RankAndSize ranks) {
  if (source != Source::arguments) return launcher.source == source;
  if (launcher.source == Source::slurm && !is_slurm_task(env)) return false;
  return env.text(launcher.rank) == std::to_string(ranks.rank) &&
         env.text(launcher.size) == std::to_string(ranks.size) && !is_srun_pmi(env, launcher);
}

bool spans_hosts(const EnvironmentReader& env, const Launcher& launcher, int size) {
  return (launcher.local_size && env.has(launcher.local_size) && env.number(launcher.local_size) < size) ||
         (launcher.source == Source::slurm && env.has("SLURM_NNODES") && env.number("SLURM_NNODES") > 1);
}

}  // namespace

const Launcher* launcher_of(Source source) {
  const auto* found = std::find_if(std::begin(kLaunchers), std::end(kLaunchers),
                                   [&](const Launcher& launcher) { return launcher.source == source; });
  return found == std::end(kLaunchers) ? nullptr : found;
}

std::optional<Found> find_launcher(const EnvironmentReader& env) {
  for (const auto& launcher : kLaunchers) {
    const auto ranks = read_launcher(env, launcher);
    if (!ranks || is_srun_pmi(env, launcher)) continue;
    check_contradiction(env, launcher, *ranks);
    return Found{&launcher, *ranks};
  }
  return std::nullopt;
}

void check_range(RankAndSize ranks, const std::string& evidence) {
  const auto [rank, size] = ranks;
  if (size < 1) refuse_start(evidence + ": the world size must be at least 1.");
  if (rank < 0 || rank >= size)
    refuse_start(evidence + ": the rank must be in [0, " + std::to_string(size) + "). Start " + std::to_string(size) +
                 " processes with ranks 0 to " + std::to_string(size - 1) + ".");
}

bool launcher_spans_hosts(const EnvironmentReader& env, Source source, RankAndSize ranks) {
  return std::any_of(std::begin(kLaunchers), std::end(kLaunchers), [&](const Launcher& launcher) {
    return tells_of(env, launcher, source, ranks) && spans_hosts(env, launcher, ranks.size);
  });
}

std::string job_name(const EnvironmentReader& env) {
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})
    if (auto value = env.text(name)) return "job-" + *value;
  if (auto job = env.text("SLURM_JOB_ID")) return "slurm-" + *job + "." + env.text("SLURM_STEP_ID").value_or("0");
  return "parent-" + parent_identity();  // MPICH's proxy tells no name, but it is the parent of all local ranks
}

}  // namespace unisono
