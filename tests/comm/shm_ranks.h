#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "comm/shm/shm_group.h"
#include "comm/test_store.h"
#include "process.h"

namespace unisono::testing {

/// A folder of its own that is gone at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "unisono_shm_XXXXXX").string()) {
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("cannot make a folder");
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Options of one rank that is a process; all ranks meet in `folder`.
inline GroupOptions options_in(const std::string& folder, int rank, int size) {
  return {.rank = rank,
          .size = size,
          .store = std::make_shared<FolderStore>(folder),
          .timeout = std::chrono::seconds(60),
          .start_timeout = std::chrono::seconds(60)};
}

/// Rank `rank` of `size` as a process of its own that runs `scenario` (see shm_children.cc).
inline Child start_rank(const std::string& scenario, const std::string& folder, int rank, int size) {
  return start_child(scenario, {folder, std::to_string(rank), std::to_string(size)});
}

/// A rank that crashes on purpose should not leave a core file.
inline void no_core_file() {
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
}

}  // namespace unisono::testing
