#pragma once

#include <memory>
#include <string>

#include <unisono/make_group.h>

#include "comm/mpi/engine.h"

namespace unisono {

/// Why there can be no mpi group with these options here, and what to do; empty when there can. Does not start MPI.
std::string why_not_mpi(const GroupOptions& options);

/// All ranks of MPI_COMM_WORLD; a size of 1 in the options means that MPI is asked for rank and size. Starts MPI if need be.
/// *Collective*. *Blocks*. *Throws* `invalid_argument`, `timeout`.
std::shared_ptr<ProcessGroup> make_mpi_group(const GroupOptions& options);

/// The ranks of any communicator. *Collective* over it.
std::shared_ptr<ProcessGroup> make_mpi_group(MpiLibrary& library, MpiHandle parent, const MpiEngineOptions& options);

}  // namespace unisono
