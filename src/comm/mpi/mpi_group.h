#pragma once

#include <unisono/make_group.h>

#include <memory>
#include <string>

#include "comm/hierarchy/hierarchy_group.h"
#include "comm/mpi/engine.h"

namespace unisono {

/// Why there can be no mpi group with these options here, and what to do; empty when there can. Does not start MPI.
std::string why_not_mpi(const GroupOptions& options);

/// All ranks of MPI_COMM_WORLD; a size of 1 in the options means that MPI is asked for rank and size. Starts MPI if
/// need be. *Collective*. *Blocks*. *Throws* `invalid_argument`, `timeout`.
std::shared_ptr<ProcessGroup> make_mpi_group(const GroupOptions& options);

/// The ranks of any communicator. *Collective* over it.
std::shared_ptr<ProcessGroup> make_mpi_group(MpiLibrary& library, MpiHandle parent, const MpiEngineOptions& options);

/// The same in two levels where there are several hosts with several ranks: shared memory inside a host, MPI between.
/// *Throws* as `make_over_hosts`.
std::shared_ptr<ProcessGroup> make_mpi_group_over_hosts(MpiLibrary& library, MpiHandle parent,
                                                        const MpiEngineOptions& options, const OpenHostStore& open);
/// Of all ranks of MPI_COMM_WORLD, as `make_mpi_group(options)`.
std::shared_ptr<ProcessGroup> make_mpi_group_over_hosts(const GroupOptions& options, const OpenHostStore& open);

}  // namespace unisono
