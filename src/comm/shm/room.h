#pragma once

#include <cstdint>
#include <string>

namespace unisono::shm {

/// How much memory there is, and what sets the bound.
struct Room {
  std::uint64_t bytes = UINT64_MAX;
  std::string limit;  ///< "the memory limit of cgroup /a/b"
};

/// What all processes here can still take together: the least of the cgroups' room and the machine's available memory.
/// A full cgroup does not refuse memory, it kills; so look first.
Room room_of_host();
/// The largest file, and so memfd, this process may have (RLIMIT_FSIZE); beyond it the system sends SIGXFSZ.
Room room_of_process();

}  // namespace unisono::shm
