#pragma once

#include <string>

namespace unisono {

/// A process, told apart from every other one that ever ran: its number is reused, but not together with its start
/// time, the host's boot and the pid namespace.
struct ProcessIdentity {
  std::string host;   ///< for people
  std::string place;  ///< boot id and pid namespace: where `pid` means something
  long pid = 0;
  std::string started;  ///< clock ticks since boot

  bool operator==(const ProcessIdentity& other) const {
    return place == other.place && pid == other.pid && started == other.started;
  }
  std::string to_string() const;  ///< for a store; no line breaks
  /// *Throws* `corrupt` when `text` did not come from `to_string`.
  static ProcessIdentity parse(const std::string& text);
  static ProcessIdentity self();

  /// Whether it still runs. A process elsewhere, which cannot be seen from here, counts as running.
  bool alive() const;
  /// "pid 123 on host a".
  std::string shown() const;
};

/// Names this process's parent, with its start time.
std::string parent_identity();

}  // namespace unisono
