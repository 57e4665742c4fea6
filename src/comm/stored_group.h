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
  /// How many groups have been made of this one's ranks: the same on ranks that are in all of them. A try that failed does
  /// not count, so that those who try again meet where the others still wait.
  int departures() const { return departures_; }
  void departed() { ++departures_; }

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
