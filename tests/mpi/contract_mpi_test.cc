#include "comm/contract.h"
#include "mpi/mpi_ranks.h"

// The contract over MPI: mpirun -n 4 mpi_tests. All processes run all tests, each as its own rank.

namespace unisono::testing {
namespace {

const Transport& whole() {
  static const Transport transport = mpi_transport("mpi", kMpiLongestBlock);
  return transport;
}

// Everything longer than 1,000 bytes goes in several requests, as what is longer than an int otherwise does.
const Transport& in_parts() {
  static const Transport transport = mpi_transport("mpi_in_parts", 1000);
  return transport;
}

// Ranks 0 and 1 on one host, 2 and 3 on another.
const Transport& on_two_hosts() {
  static const Transport transport = mpi_transport_over_hosts("mpi_on_two_hosts", "aabb");
  return transport;
}

// Sums are another tree's.
const Transport& on_crossed_hosts() {
  static const Transport transport = [] {
    Transport out = mpi_transport_over_hosts("mpi_on_crossed_hosts", "abba");
    out.numbers = Numbers::small;
    return out;
  }();
  return transport;
}

INSTANTIATE_TEST_SUITE_P(Mpi, Contract, ::testing::Values(whole(), in_parts(), on_two_hosts(), on_crossed_hosts()));

}  // namespace
}  // namespace unisono::testing
