#include "comm/shm_children.h"

#include <sys/mman.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <vector>

#include "comm/shm_ranks.h"

// What the ranks that are processes of their own do in shm_peer_test.cc and shm_start_test.cc.

namespace unisono::testing {
namespace {

std::shared_ptr<ProcessGroup> join(const Arguments& a) {
  return make_shm_group(options_in(a[0], std::stoi(a[1]), std::stoi(a[2])));
}

[[noreturn]] void sleep_for_ever() {
  for (;;) pause();
}

Buffer floats(const Buffer& b) { return {.data = b.data, .count = b.count / 4, .dtype = Dtype::f32, .owner = b.owner}; }

// Reading here faults, and the process dies of it: a death at a known place in the code.
void break_page_of(void* data) { mprotect(data, 4096, PROT_NONE); }

void* fault_page = nullptr;
void stop_at_fault(int) {
  std::raise(SIGSTOP);
  mprotect(fault_page, 4096, PROT_READ | PROT_WRITE);
}

const RegisterChild kIdle("shm-idle", [](const Arguments& a) {
  auto group = join(a);
  group->barrier({.tag = {.step = 7, .what = "hello"}}).wait();
  sleep_for_ever();
  return 0;
});

const RegisterChild kLeave("shm-leave", [](const Arguments& a) {
  join(a)->barrier().wait();
  return kAsExpected;
});

const RegisterChild kDieStaged("shm-die-staged", [](const Arguments& a) {
  no_core_file();
  auto group = join(a);
  char* memory =
      static_cast<char*>(mmap(nullptr, kLargeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  break_page_of(memory + kLargeBytes / 2);
  std::signal(SIGSEGV, SIG_DFL);
  group->all_reduce({.data = memory, .count = kLargeBytes / 4, .dtype = Dtype::f32}).wait();
  return 1;
});

const RegisterChild kDieInPlace("shm-die-in-place", [](const Arguments& a) {
  no_core_file();
  auto group = join(a);
  Buffer memory = group->allocate(kSharedBytes);
  std::memset(memory.data, 0, kSharedBytes);
  break_page_of(static_cast<char*>(memory.data) + kSharedBytes - 4096);
  std::signal(SIGSEGV, SIG_DFL);
  group->all_reduce(floats(memory)).wait();
  return 1;
});

// Stops in the middle of writing into all copies; when continued, it writes the rest, late.
const RegisterChild kStopInPlace("shm-stop-in-place", [](const Arguments& a) {
  auto group = join(a);
  Buffer memory = group->allocate(kSharedBytes);
  std::memset(memory.data, 0, kSharedBytes);
  fault_page = static_cast<char*>(memory.data) + kSharedBytes - 4096;
  std::signal(SIGSEGV, stop_at_fault);
  break_page_of(fault_page);
  try {
    group->all_reduce(floats(memory)).wait();
  } catch (const Error& e) {
    return e.code() == ErrorCode::timeout ? kAsExpected : 1;
  }
  return 2;
});

const RegisterChild kReduceForEver("shm-reduce-for-ever", [](const Arguments& a) {
  auto group = join(a);
  Buffer shared = floats(group->allocate(kSharedBytes));
  std::vector<float> own(kLargeBytes / 4);
  FolderStore(a[0]).add("running", 1);
  for (;;) {
    group->all_reduce(shared);
    group->all_reduce({.data = own.data(), .count = own.size(), .dtype = Dtype::f32}).wait();
  }
  return 0;
});

const RegisterChild kStartOnly("shm-start-only", [](const Arguments& a) {
  try {
    join(a);
  } catch (const Error& e) {
    FolderStore(a[0]).set("error", e.what());
    return kAsExpected;
  }
  return 0;
});

const RegisterChild kSmallFiles("shm-small-files", [](const Arguments& a) {
  const rlimit small{8192, 8192};
  setrlimit(RLIMIT_FSIZE, &small);
  try {
    join(a);
  } catch (const Error& e) {
    return e.code() == ErrorCode::invalid_argument ? kAsExpected : 1;
  }
  return 0;
});

const RegisterChild kSmallAllocation("shm-small-allocation", [](const Arguments& a) {
  auto group = join(a);
  const rlimit small{1 << 20, 1 << 20};
  setrlimit(RLIMIT_FSIZE, &small);
  try {
    group->allocate(kLargeBytes);
    return 1;
  } catch (const Error& e) {
    FolderStore(a[0]).set("error", e.what());
  }
  group->barrier().wait();
  return kAsExpected;
});

}  // namespace
}  // namespace unisono::testing
