#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/process_identity.h"

namespace unisono::shm {

/// Shared memory without a name: a memfd, mapped. It is gone when the last process that maps it is, however that one
/// ends.
class Mapping {
 public:
  /// New, zeroed memory of which no page exists yet. *Throws* `internal`.
  static std::shared_ptr<Mapping> create(std::size_t bytes);
  /// The memory behind descriptor `fd` of another process. *Throws* `internal` saying what to do.
  static std::shared_ptr<Mapping> open(const ProcessIdentity& process, int fd, std::size_t bytes);
  /// The memory that another rank of this process has created, by its `id()`; null when it is gone.
  static std::shared_ptr<Mapping> find(std::uint64_t id);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  /// Its number in this process; 0: created by another.
  std::uint64_t id() const { return id_; }

  /// Makes pages exist (all, or the first `bytes`), so that later use cannot fail. False when there is no memory.
  bool reserve();
  bool reserve(std::size_t bytes);
  /// The same for some pages of memory that may be another process's.
  bool reserve_part(std::size_t offset, std::size_t bytes);
  /// Enters the pages in this process's page tables; an optimisation.
  void populate();
  /// No one can open it any more; those who have it keep it.
  void close_descriptor();
  /// Gives the pages back to the system, whoever else maps them.
  void give_back();
  /// Puts private pages with the same content at the same address: others can no longer write here. False without
  /// memory.
  bool take_private();

 private:
  Mapping(std::byte* data, std::size_t bytes, int fd) : data_(data), bytes_(bytes), fd_(fd) {}

  std::byte* data_;
  std::size_t bytes_;
  int fd_;
  std::uint64_t id_ = 0;
};

}  // namespace unisono::shm
