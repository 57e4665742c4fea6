#pragma once

#include <string>
#include <vector>

#include "comm/emulated_hosts.h"

namespace unisono::testing {

/// Four ranks, processes of two emulated hosts, one of which kills itself in the middle of a call. One static object
/// per kind of engine between the hosts.
class PhasesOfDeath {
 public:
  PhasesOfDeath(const std::string& name, EngineAmong among);

  /// Before the headers, with those of all hosts, before the data moves, in shared memory, between hosts, and with what
  /// came from there.
  static const std::vector<std::string>& all();
  /// The others must each end with `peer_lost` naming rank `victim`, long before the deadline of their calls.
  void run(const std::string& phase, int victim) const;

 private:
  std::string name_;
};

}  // namespace unisono::testing
