#pragma once

#include <unisono/log.h>
#include <unisono/make_group.h>
#include <unisono/process_group.h>

#include <chrono>
#include <memory>
#include <string>

namespace unisono {

struct InitOptions {
  std::string transport = "auto";          ///< see `make_group`
  int rank = -1;                           ///< -1: from the environment
  int size = -1;                           ///< -1: from the environment
  std::shared_ptr<Store> store = nullptr;  ///< null: made from the environment
  std::chrono::nanoseconds timeout = std::chrono::minutes(30);
  std::chrono::nanoseconds start_timeout = std::chrono::minutes(5);
  std::string prefix = "unisono";  ///< see `GroupOptions`
  LogSink log = nullptr;           ///< told in one line what the environment said, and which source
};

/// Makes this process's group from its environment. In this order: explicit arguments; RANK and WORLD_SIZE (torchrun,
/// `unisono run`, by hand) with MASTER_ADDR and MASTER_PORT or UNISONO_STORE=file:PATH; OMPI_COMM_WORLD_RANK/SIZE
/// (mpirun); PMI_RANK/PMI_SIZE (MPICH); SLURM_PROCID/SLURM_NTASKS (srun); with none of them a world of one.
/// Rendezvous is a c10d TCPStore, or a FileStore where the launcher tells no address (mpirun, srun on one host).
/// Where the launcher, or UNISONO_HOST_PART, tells of several hosts, "auto" is two levels: shared memory among ranks
/// that share a host, and between hosts MPI where mpirun, mpiexec or srun has brought one, else Gloo. Without an
/// address they meet by MPI, and there is nothing else to set. "mpi" and "gloo" by name are one level.
/// *Collective*. *Blocks*. *Throws* `invalid_argument` for a missing or contradictory environment, naming the variables
/// and their values; `timeout` naming the missing ranks.
std::shared_ptr<ProcessGroup> init(const InitOptions& options = {});

/// Which source `init()` would use and what it says there, for people ("RANK=1 WORLD_SIZE=2 from torchrun ...").
std::string describe_environment();

}  // namespace unisono
