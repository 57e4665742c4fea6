#pragma once

#include <unisono/buffer.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace unisono {

/// Which group's memory a buffer lies in. Memory that was given back is forgotten. *Threads*: any.
class Homes {
 public:
  void add(const Buffer& memory, std::size_t group);
  /// The group that allocated all of `buffer`; empty for other memory and for a buffer without elements.
  std::optional<std::size_t> find(const Buffer& buffer);

 private:
  struct Home {
    std::size_t bytes;
    std::size_t group;
    std::weak_ptr<void> owner;
  };
  std::mutex mutex_;
  std::map<const std::byte*, Home> by_address_;
};

}  // namespace unisono
