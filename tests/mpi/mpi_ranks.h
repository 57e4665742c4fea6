#pragma once

#include "comm/contract.h"
#include "comm/mpi/library.h"

namespace unisono::testing {

/// This program's ranks: the processes that mpirun has started.
struct MpiWorld {
  int rank = 0;
  int size = 1;
};
MpiWorld mpi_world();

/// The first `size` ranks; called by all.
MpiHandle first_ranks(int size);

/// Groups of MPI with requests of at most `longest_block` bytes. Filled in before the tests are registered.
Transport mpi_transport(const std::string& name, std::size_t longest_block);

/// The same in two levels, on hosts that UNISONO_HOST_PART makes of one: a letter of `parts` per rank.
Transport mpi_transport_over_hosts(const std::string& name, const std::string& parts);

}  // namespace unisono::testing
