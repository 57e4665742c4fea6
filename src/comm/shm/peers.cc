#include "comm/shm/peers.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unisono/error.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace unisono::shm {

Peers::Peers(int rank, std::vector<ProcessIdentity> processes) : rank_(rank), processes_(std::move(processes)) {
  pidfds_.assign(processes_.size(), -1);
  for (std::size_t r = 0; r < processes_.size(); ++r) {
    if (is_here(static_cast<int>(r))) {
      any_here_ |= static_cast<int>(r) != rank_;
      continue;
    }
    pidfds_[r] = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(processes_[r].pid), 0u));
    // It may have ended, and its number may have been given to another process, before we looked.
    if (pidfds_[r] >= 0 ? !processes_[r].alive() : errno == ESRCH) {
      dead_ |= 1ull << r;
    } else if (pidfds_[r] < 0) {
      throw Error(ErrorCode::internal, "pidfd_open for rank " + std::to_string(r) + ", " + processes_[r].shown() +
                                           ": " + std::strerror(errno) + " (Linux 5.3 or newer is needed)");
    }
  }
}

Peers::~Peers() {
  for (const int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

std::uint64_t Peers::dead() {
  for (std::size_t r = 0; r < pidfds_.size(); ++r) {
    if (pidfds_[r] < 0 || (dead_ >> r & 1)) continue;
    pollfd look{pidfds_[r], POLLIN, 0};
    if (poll(&look, 1, 0) == 1) dead_ |= 1ull << r;
  }
  return dead_;
}

}  // namespace unisono::shm
