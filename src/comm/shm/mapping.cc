#include "comm/shm/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unisono/error.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace unisono::shm {
namespace {

std::byte* map_shared(int fd, std::size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

[[noreturn]] void fail(const std::string& what, int error) {
  throw Error(ErrorCode::internal, "shared memory: " + what + ": " + std::strerror(error));
}

// What this process has created, for those of its threads that are other ranks.
class Created {
 public:
  std::uint64_t add(const std::shared_ptr<Mapping>& mapping) {
    const std::lock_guard lock(mutex_);
    by_id_[++last_] = mapping;
    return last_;
  }
  void forget(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    by_id_.erase(id);
  }
  std::shared_ptr<Mapping> find(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<Mapping>> by_id_;
  std::uint64_t last_ = 0;
};

// Never destroyed: memory may be let go of by a thread while the process ends.
Created& created() {
  static auto* const here = new Created;
  return *here;
}

}  // namespace

std::shared_ptr<Mapping> Mapping::find(std::uint64_t id) { return created().find(id); }

std::shared_ptr<Mapping> Mapping::create(std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  const int fd = memfd_create("unisono", MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create", errno);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(fd);
    fail("ftruncate to " + std::to_string(bytes) + " bytes", error);
  }
  std::byte* data = map_shared(fd, bytes);
  if (data == nullptr) {
    const int error = errno;
    close(fd);
    fail("mapping " + std::to_string(bytes) + " bytes", error);
  }
  std::shared_ptr<Mapping> made(new Mapping(data, bytes, fd));
  made->id_ = created().add(made);
  return made;
}

std::shared_ptr<Mapping> Mapping::open(const ProcessIdentity& process, int fd, std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  const std::string path = "/proc/" + std::to_string(process.pid) + "/fd/" + std::to_string(fd);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) {
    const int error = errno;
    const char* hint = error == EACCES || error == EPERM
                           ? " (is that process of another user, or made non-dumpable? All ranks must run as one user)"
                           : "";
    fail("opening the memory of " + process.shown() + " through " + path + hint, error);
  }
  std::byte* data = map_shared(opened, bytes);
  const int error = errno;
  close(opened);
  if (data == nullptr) fail("mapping " + std::to_string(bytes) + " bytes of " + process.shown(), error);
  return std::shared_ptr<Mapping>(new Mapping(data, bytes, -1));
}

Mapping::~Mapping() {
  if (id_ != 0) created().forget(id_);
  munmap(data_, bytes_);
  close_descriptor();
}

bool Mapping::reserve() { return reserve(bytes_); }

bool Mapping::reserve(std::size_t bytes) {
  int result = 0;
  do {
    result = fallocate(fd_, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

// Before Linux 5.14 this cannot be asked for, and pages come when they are touched.
bool Mapping::reserve_part(std::size_t offset, std::size_t bytes) {
  return madvise(data_ + offset, bytes, MADV_POPULATE_WRITE) == 0 || errno == EINVAL;
}

void Mapping::populate() { madvise(data_, bytes_, MADV_POPULATE_WRITE); }

void Mapping::close_descriptor() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void Mapping::give_back() { madvise(data_, bytes_, MADV_REMOVE); }

bool Mapping::take_private() {
  void* fresh = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return false;
  std::memcpy(fresh, data_, bytes_);
  if (mremap(fresh, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, data_) == MAP_FAILED) {
    munmap(fresh, bytes_);
    return false;
  }
  return true;
}

}  // namespace unisono::shm
