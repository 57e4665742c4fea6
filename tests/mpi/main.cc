#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "mpi/mpi_ranks.h"
#include "mpi/scenes.h"

// mpi_tests: the contract suite as one rank among those that mpirun has started. mpi_tests --scene NAME: see scenes.h.
int main(int argc, char** argv) {
  using namespace unisono::testing;
  if (const std::string reason = unisono::MpiLibrary::why_not(); !reason.empty()) {
    std::fprintf(stderr, "mpi_tests: %s\n", reason.c_str());
    return 77;
  }
  if (argc == 3 && std::string(argv[1]) == "--scene") return play(argv[2]);
  ::testing::InitGoogleTest(&argc, argv);
  if (mpi_world().rank != 0) ::testing::GTEST_FLAG(brief) = true;
  return RUN_ALL_TESTS();
}
