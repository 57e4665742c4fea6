#include <gtest/gtest.h>

#include "process.h"

// The program of all torch-free tests. Called as a child (see process.h) it runs that instead.
int main(int argc, char** argv) {
  int exit_code = 0;
  if (unisono::testing::run_as_child(argc, argv, &exit_code)) return exit_code;
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
