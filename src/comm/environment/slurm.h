#pragma once

#include "comm/environment/reader.h"

namespace unisono {

/// Whether srun has started this process as one of SLURM_NTASKS. Slurm tells the allocation's number of tasks to
/// processes that are none of them, too: a shell of salloc, a batch script, the one task of an interactive step.
bool is_slurm_task(const EnvironmentReader& env);

/// Where the tasks of a step meet over TCP: at a port of the step's own on its first node, where rank 0 runs.
struct SlurmAddress {
  std::string host;
  int port = 0;
  std::string evidence;  ///< the variables it was read from
};
/// Empty where Slurm does not tell the nodes, or not which is rank 0's and an MPI knows better.
/// *Throws* `invalid_argument` where rank 0's node is not told and nobody knows better.
std::optional<SlurmAddress> slurm_address(const EnvironmentReader& env);

}  // namespace unisono
