#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.h"
#include "comm/shm/mapping.h"

namespace unisono::shm {

class Allocations;

/// Memory from one collective `allocate`: this rank's own part and what it maps of its peers'.
struct Allocation {
  std::uint64_t id = 0;
  int rank = 0;
  std::vector<std::shared_ptr<Mapping>> copies;  ///< one per rank
  std::shared_ptr<Allocations> registry;
  ForkMark mark = {};  ///< a forked child that lets go of it leaves the memory to the rank

  Mapping& own() const { return *copies[static_cast<std::size_t>(rank)]; }
  ~Allocation();
};

/// Where in which allocation a buffer lies.
struct Place {
  std::shared_ptr<Allocation> allocation;
  std::uint64_t offset = 0;
};

/// The live allocations of one rank, by address. Outlives the group when buffers do.
/// *Threads*: any.
class Allocations {
 public:
  void add(const std::shared_ptr<Allocation>& allocation);
  void forget(const Allocation& allocation);
  /// The allocation that holds all of [data, data + bytes); null when there is none.
  Place find(const void* data, std::size_t bytes);

 private:
  std::mutex mutex_;
  std::map<const std::byte*, std::weak_ptr<Allocation>> by_address_;
};

}  // namespace unisono::shm
