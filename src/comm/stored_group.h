#pragma once

#include <unisono/make_group.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

namespace unisono {

/// A group whose ranks met in a store, and could meet there again.
class StoredGroup : public ProcessGroup {
 public:
  /// As given to `make_group`; the store is kept as long as the group.
  const GroupOptions& options() const { return options_; }
  /// What the keys begin with that only this group uses, the same on all its ranks; empty in a world of one.
  const std::string& place() const { return place_; }
  /// Ranks whose process has ended or that have destroyed their group, as this rank sees it now.
  virtual std::vector<int> lost() const = 0;
  /// Numbers the departures from this group: 0, 1, ..., alike on ranks that call alike. A departure ends when a group has
  /// been made or when the ranks have read that they do not agree; not when some did not come in time: those who try
  /// again meet where the others still wait.
  int departure() const { return departures_; }
  void end_departure() { ++departures_; }

 protected:
  StoredGroup(const GroupOptions& options, std::string name, std::string place)
      : ProcessGroup(options.rank, options.size, std::move(name), options.timeout),
        options_(options),
        place_(std::move(place)) {}

 private:
  GroupOptions options_;
  std::string place_;
  std::atomic<int> departures_ = 0;
};

}  // namespace unisono
