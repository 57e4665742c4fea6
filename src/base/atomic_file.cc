#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unisono/error.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace unisono {
namespace {

[[noreturn]] void fail(const std::string& path, const char* step, int error) {
  throw Error(ErrorCode::invalid_argument, "cannot write " + path + ": " + step + ": " + std::strerror(error) +
                                               ". Check that the folder exists, is writable and has room");
}

/// A file that goes away unless `keep` is called.
class TemporaryFile {
 public:
  TemporaryFile(const std::string& target, std::string pattern) : target_(target), path_(std::move(pattern)) {
    fd_ = mkostemp(path_.data(), O_CLOEXEC);
    if (fd_ < 0) fail(target_, "creating a temporary file", errno);
    const mode_t mask = umask(0);
    umask(mask);
    fchmod(fd_, 0666 & ~mask);
  }
  ~TemporaryFile() {
    if (fd_ >= 0) close(fd_);
    if (!kept_) unlink(path_.c_str());
  }

  void write(std::string_view content) {
    while (!content.empty()) {
      const ssize_t n = ::write(fd_, content.data(), content.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(target_, "writing", errno);
      content.remove_prefix(static_cast<std::size_t>(n));
    }
    if (fsync(fd_) != 0) fail(target_, "flushing", errno);
  }

  void keep() {
    const int fd = fd_;
    fd_ = -1;
    if (close(fd) != 0) fail(target_, "closing", errno);
    if (rename(path_.c_str(), target_.c_str()) != 0) fail(target_, "renaming", errno);
    kept_ = true;
  }

 private:
  const std::string& target_;
  std::string path_;
  int fd_ = -1;
  bool kept_ = false;
};

/// A rename is on disk only when its folder is. Folders that cannot be opened or flushed are left to the system.
void flush_folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  close(fd);
}

}  // namespace

void write_file_atomically(const std::string& path, std::string_view content) {
  TemporaryFile file(path, path + ".tmp-XXXXXX");
  file.write(content);
  file.keep();
  flush_folder_of(path);
}

}  // namespace unisono
