#include "comm/shm/event.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace unisono::shm {
namespace {

std::uint32_t* address_of(std::atomic<std::uint32_t>& word) {
  static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
  return reinterpret_cast<std::uint32_t*>(&word);
}

}  // namespace

void Sleeper::sleep(std::int64_t ns) {
  if (ns <= 0) return;
  const timespec limit{ns / 1'000'000'000, ns % 1'000'000'000};
  syscall(SYS_futex, address_of(event_.version), FUTEX_WAIT, seen_, &limit, nullptr, 0);
}

void wake_all(EventWords& event) {
  event.version.fetch_add(1);
  syscall(SYS_futex, address_of(event.version), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace unisono::shm
