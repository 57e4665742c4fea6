#include "comm/shm/room.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace unisono::shm {
namespace {

void narrow(Room& room, std::uint64_t bytes, const std::string& limit) {
  if (bytes < room.bytes) room = {bytes, limit};
}

bool read_number(const std::string& path, std::uint64_t& value) {
  std::ifstream file(path);
  return static_cast<bool>(file >> value);  // "max" does not parse: no limit
}

// The value behind `key` in a file of "key value" or "key: value kB" lines.
std::uint64_t read_field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  std::uint64_t value = 0;
  std::string rest;
  while (file >> name >> value && std::getline(file, rest)) {
    if (name == key) return value;
  }
  return 0;
}

// Cached file pages count as used but are given up on demand.
void look_at_cgroup(Room& room, const std::string& folder, const std::string& name, bool unified) {
  std::uint64_t limit = 0;
  std::uint64_t used = 0;
  if (!read_number(folder + (unified ? "/memory.max" : "/memory.limit_in_bytes"), limit)) return;
  if (!read_number(folder + (unified ? "/memory.current" : "/memory.usage_in_bytes"), used)) return;
  const std::uint64_t cached = read_field(folder + "/memory.stat", unified ? "inactive_file" : "total_inactive_file");
  used -= std::min(used, cached);
  narrow(room, limit > used ? limit - used : 0, "the memory limit of cgroup " + name);
}

void look_at_cgroups(Room& room, const std::string& mount, std::string path, bool unified) {
  for (;;) {
    look_at_cgroup(room, mount + (path == "/" ? "" : path), path, unified);
    if (path.empty() || path == "/") return;
    const auto slash = path.rfind('/');
    path = slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
  }
}

}  // namespace

Room room_of_host() {
  Room room;
  const std::uint64_t available = read_field("/proc/meminfo", "MemAvailable:");
  if (available > 0) narrow(room, available * 1024, "the available memory of this machine");
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) look_at_cgroups(room, "/sys/fs/cgroup", path, true);
    if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      look_at_cgroups(room, "/sys/fs/cgroup/memory", path, false);
    }
  }
  return room;
}

Room room_of_process() {
  rlimit limit{};
  Room room;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    narrow(room, limit.rlim_cur, "this process's RLIMIT_FSIZE (ulimit -f)");
  }
  return room;
}

}  // namespace unisono::shm
