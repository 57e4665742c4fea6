#include <stdlib.h>
#include <unisono/c10d.h>
#include <unisono/companion.h>
#include <unisono/make_group.h>
#include <unisono/round_robin.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>

#include "comm/c10d/recorded_group.h"

namespace unisono {
namespace {

std::string here(const ProcessGroup& group) {
  return "companion of group " + group.name() + ", rank " + std::to_string(group.rank()) + ": ";
}

// Made and removed by rank 0.
class MeetingDirectory {
 public:
  explicit MeetingDirectory(ProcessGroup& group) {
    constexpr std::size_t kLongest = 4096;
    std::array<char, kLongest> text{};
    if (group.rank() == 0) make(text.data(), kLongest);
    CallOptions options;
    options.tag.what = "companion";
    group.broadcast({text.data(), text.size(), Dtype::u8}, 0, options).wait();
    if (text[0] != '/') {
      throw Error(ErrorCode::invalid_argument,
                  here(group) + "rank 0 cannot make a directory to meet in: " + text.data());
    }
    path_ = text.data();
  }
  ~MeetingDirectory() {
    std::error_code ignored;
    if (!made_.empty()) std::filesystem::remove_all(made_, ignored);
  }
  MeetingDirectory(const MeetingDirectory&) = delete;
  MeetingDirectory& operator=(const MeetingDirectory&) = delete;

  std::string file() const { return path_ + "/store"; }

 private:
  void make(char* text, std::size_t longest) {
    std::error_code error;
    const auto parent = std::filesystem::temp_directory_path(error);
    std::string path = std::filesystem::absolute(parent).string() + "/unisono-companion-XXXXXX";
    if (error || !mkdtemp(path.data())) {
      path = error ? error.message() : std::string(std::strerror(errno));
    } else {
      made_ = path;
    }
    std::strncpy(text, path.c_str(), longest - 1);
  }

  std::string made_;  // rank 0
  std::string path_;
};

std::shared_ptr<ProcessGroup> make_second(ProcessGroup& group) {
  const MeetingDirectory place(group);
  GroupOptions options{.rank = group.rank(), .size = group.size()};
  auto file = c10::make_intrusive<c10d::FileStore>(place.file(), -1);
  file->setTimeout(
      std::chrono::seconds(5));  // its destructor waits for the file, should rank 0 have failed and removed it
  options.store = make_store(std::move(file));
  options.timeout = group.timeout();
  options.start_timeout = std::min<std::chrono::nanoseconds>(group.timeout(), std::chrono::minutes(5));
  auto second = make_group(group.name(), options);
  options.store = nullptr;
  second->barrier().wait();  // nobody looks at the file any more when rank 0 removes it
  return second;
}

std::shared_ptr<ProcessGroup> duplicate(ProcessGroup& group) {
  if (group.name() == "shm") return make_second(group);
  if (const auto parts = groups_of_round_robin(group); !parts.empty()) return companion(parts[0]);
  throw Error(ErrorCode::invalid_argument,
              here(group) +
                  "only shared memory, and a round robin that begins with it, can be duplicated here. Make a second "
                  "group of the same ranks "
                  "(torch.distributed.new_group; in C++ make_group with another prefix) and give it to set_companion");
}

}  // namespace

std::shared_ptr<ProcessGroup> companion(const std::shared_ptr<ProcessGroup>& group) {
  if (group->size() == 1) return group;
  std::lock_guard lock(group->companion_mutex_);
  if (!group->companion_) group->companion_ = std::make_shared<RecordedGroup>(duplicate(*group));
  return group->companion_;
}

void set_companion(const std::shared_ptr<ProcessGroup>& group, std::shared_ptr<ProcessGroup> companion) {
  if (companion->rank() != group->rank() || companion->size() != group->size()) {
    throw Error(ErrorCode::invalid_argument,
                here(*group) + "the other group's member is rank " + std::to_string(companion->rank()) + " of " +
                    std::to_string(companion->size()) + ", and this is rank " + std::to_string(group->rank()) + " of " +
                    std::to_string(group->size()) + "; a companion has the same ranks");
  }
  if (companion == group) {
    throw Error(ErrorCode::invalid_argument, here(*group) + "a group cannot be its own companion; make a second one");
  }
  std::lock_guard lock(group->companion_mutex_);
  if (group->companion_) {
    throw Error(ErrorCode::invalid_argument, here(*group) + "it has one already; set it before the first use");
  }
  group->companion_ = std::make_shared<RecordedGroup>(std::move(companion));
}

std::shared_ptr<RecordedGroup> recorded_companion(const std::shared_ptr<ProcessGroup>& group) {
  std::lock_guard lock(group->companion_mutex_);
  return group->companion_;
}

}  // namespace unisono
