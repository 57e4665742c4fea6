#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace unisono {
namespace {

// Counted in the child before its fork() returns. Asking is a load, where getpid() is a system call.
std::atomic<int>& forks() {
  static std::atomic<int> count{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks(); });
  (void)registered;
  return count;
}

}  // namespace

ForkMark::ForkMark() : made_in_(forks()) {}
bool ForkMark::forked() const { return forks() != made_in_; }

}  // namespace unisono
