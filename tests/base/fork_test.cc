#include "base/fork.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace unisono {
namespace {

TEST(ForkMark, TellsTheChildFromTheParent) {
  const ForkMark mark;
  const pid_t child = fork();
  if (child == 0) _exit(mark.forked() && !ForkMark().forked() ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(mark.forked());
}

}  // namespace
}  // namespace unisono
