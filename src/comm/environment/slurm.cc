#include "comm/environment/slurm.h"

namespace unisono {
namespace {

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
int port_of_step(const EnvironmentReader& env) {
  const auto job = env.number<unsigned>("SLURM_JOB_ID");
  const auto step = env.has("SLURM_STEP_ID") ? env.number<unsigned>("SLURM_STEP_ID") : 0;
  return 10'000 + static_cast<int>((job + 7919ULL * step) % 20'000);
}

// Slurm sorts the list of nodes; where tasks were laid out by hand or are of several components, rank 0 may be on any.
bool rank0_is_on_first_node(const EnvironmentReader& env) {
  const bool arbitrary = env.text("SLURM_DISTRIBUTION").value_or("").starts_with("arbitrary");
  if (!arbitrary && !env.has("SLURM_HET_SIZE")) return true;
  if (env.has("PMIX_RANK") || env.has("PMI_RANK")) return false;  // MPI needs no address
  refuse_start(env.shown(arbitrary ? "SLURM_DISTRIBUTION" : "SLURM_HET_SIZE") +
               ": on which node rank 0 runs is not told. Set MASTER_ADDR to that node and MASTER_PORT to a free port "
               "there, or start an MPI with srun --mpi=pmix (or pmi2).");
}

}  // namespace

bool is_slurm_task(const EnvironmentReader& env) {
  if (!env.has("SLURM_PROCID")) return false;
  if (env.has("SLURM_STEP_NUM_TASKS")) return env.text("SLURM_STEP_NUM_TASKS") == env.text("SLURM_NTASKS");
  return env.has("SLURM_STEP_ID") || env.text("ENVIRONMENT") != "BATCH";  // a batch script is rank 0 of no step
}

std::optional<SlurmAddress> slurm_address(const EnvironmentReader& env) {
  const char* nodes = env.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  if (!env.has(nodes) || !env.has("SLURM_JOB_ID") || !rank0_is_on_first_node(env)) return std::nullopt;
  return SlurmAddress{.host = first_node(*env.text(nodes)),
                      .port = port_of_step(env),
                      .evidence = env.shown(nodes) + " " + env.shown("SLURM_JOB_ID")};
}

}  // namespace unisono
