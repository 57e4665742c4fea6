#include "comm/process_identity.h"

#include <unisono/error.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <sstream>

namespace unisono {
namespace {

struct Stat {
  char state = 'X';
  std::string started;
};

// Fields 3 and 22 of /proc/PID/stat; the command in field 2 may hold spaces and brackets, so count from its last ')'.
Stat read_stat(long pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return {};
  const auto close = line.rfind(')');
  if (close == std::string::npos) return {};
  std::istringstream fields(line.substr(close + 1));
  Stat out;
  std::string field;
  for (int number = 3; number <= 22 && fields >> field; ++number) {
    if (number == 3) out.state = field[0];
    if (number == 22) out.started = field;
  }
  return out;
}

std::string read_place() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  std::array<char, 64> link{};
  const auto length = readlink("/proc/self/ns/pid", link.data(), link.size() - 1);
  return boot + "/" + std::string(link.data(), length > 0 ? static_cast<std::size_t>(length) : 0);
}

}  // namespace

ProcessIdentity ProcessIdentity::self() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return {host.data(), read_place(), getpid(), read_stat(getpid()).started};
}

std::string ProcessIdentity::to_string() const {
  return std::to_string(pid) + " " + started + " " + place + " " + host;
}

ProcessIdentity ProcessIdentity::parse(const std::string& text) {
  std::istringstream in(text);
  ProcessIdentity out;
  if (!(in >> out.pid >> out.started >> out.place))
    throw Error(ErrorCode::corrupt,
                "the store holds '" + text + "' where a process was expected; is the key in use by another program?");
  in >> out.host;
  return out;
}

bool ProcessIdentity::alive() const {
  if (place != read_place()) return true;
  const Stat stat = read_stat(pid);
  return stat.started == started && stat.state != 'Z' && stat.state != 'X';
}

std::string ProcessIdentity::shown() const {
  return "pid " + std::to_string(pid) + (host.empty() ? "" : " on " + host);
}

std::string parent_identity() { return std::to_string(getppid()) + "-" + read_stat(getppid()).started; }

}  // namespace unisono
