#include <unisono/make_group.h>

#include "comm/mpi/mpi_group.h"
#include "comm/serial/serial_group.h"
#include "comm/shm/shm_group.h"
#include "comm/transport.h"

namespace unisono {
namespace {

std::string why_not_serial(const GroupOptions& options) {
  if (options.size == 1) return "";
  return "it is a world of one, not of " + std::to_string(options.size) + " ranks";
}

// In order of preference.
constexpr Transport kTransports[] = {
    {"serial", why_not_serial, [](const GroupOptions& o) { return make_serial_group(o); }},
    {"shm", why_not_shm, [](const GroupOptions& o) { return make_shm_group(o); }},
    {"mpi", why_not_mpi, [](const GroupOptions& o) { return make_mpi_group(o); }},
};

std::vector<Transport> transports() {
  std::vector<Transport> all(std::begin(kTransports), std::end(kTransports));
  all.insert(all.end(), torch_transports().begin(), torch_transports().end());
  return all;
}

[[noreturn]] void refuse(const GroupOptions& options, const std::string& problem) {
  throw Error(ErrorCode::invalid_argument, "make_group, rank " + std::to_string(options.rank) + " of " +
                                               std::to_string(options.size) + ": " + problem);
}

}  // namespace

std::vector<Viability> viable_transports(const GroupOptions& options) {
  std::vector<Viability> out;
  for (const auto& transport : transports()) {
    const std::string reason = transport.why_not(options);
    out.push_back({transport.name, reason.empty(), reason});
  }
  return out;
}

std::shared_ptr<ProcessGroup> make_group(const std::string& transport, const GroupOptions& options) {
  if (options.size < 1) refuse(options, "the size must be at least 1");
  if (options.rank < 0 || options.rank >= options.size) {
    refuse(options, "the rank must be 0 to " + std::to_string(options.size - 1));
  }
  if (options.timeout.count() <= 0) refuse(options, "the timeout must be positive");
  std::string names;
  std::string reasons;
  for (const auto& candidate : transports()) {
    names += std::string(names.empty() ? "" : ", ") + candidate.name;
    if (transport == "auto" ? !candidate.automatic : transport != candidate.name) continue;
    const std::string reason = candidate.why_not(options);
    if (reason.empty()) return candidate.make(options);
    reasons += std::string(reasons.empty() ? "" : "; ") + candidate.name + ": " + reason;
  }
  if (!reasons.empty()) refuse(options, "no transport can serve this group. " + reasons);
  if (transport == "gloo" || transport == "nccl")
    refuse(options, transport +
                        " comes with torch, and this program was built without it: link the library unisono, or use "
                        "the transport mpi");
  refuse(options, "unknown transport '" + transport + "'; this build has auto, " + names);
}

}  // namespace unisono
