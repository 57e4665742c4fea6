#include "comm/c10d/private_directory.h"

#include <sys/stat.h>
#include <unisono/error.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>

namespace unisono {
namespace {

namespace fs = std::filesystem;
constexpr std::time_t kDay = 24 * 60 * 60;

// mkdir and lstat rather than std::filesystem: the mode must be right from the first moment, and a link must not be
// followed.
void make_private(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    throw Error(ErrorCode::invalid_argument,
                "unisono::init: cannot make " + path + ": " + std::strerror(errno) +
                    ". Set TMPDIR to a writable directory, or MASTER_ADDR and MASTER_PORT.");
  struct stat info{};
  if (lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid() ||
      (info.st_mode & 077) != 0)
    throw Error(ErrorCode::invalid_argument, "unisono::init: " + path +
                                                 " is not a directory that only this user may enter " +
                                                 "(mode 0700). Remove it, or set TMPDIR to another directory.");
}

void remove_old(const std::string& base, const std::string& keep) {
  std::error_code ignored;  // another rank may be sweeping too
  for (const auto& entry : fs::directory_iterator(base, ignored)) {
    struct stat info{};
    if (entry.path() == keep || lstat(entry.path().c_str(), &info) != 0) continue;
    if (std::time(nullptr) - info.st_mtime > kDay) fs::remove_all(entry.path(), ignored);
  }
}

std::string safe_name(std::string job) {
  for (char& c : job)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '.' && c != '_') c = '_';
  return job;
}

}  // namespace

std::string private_job_directory(const std::string& job) {
  std::error_code ignored;
  const fs::path temporary = fs::temp_directory_path(ignored);
  const std::string base =
      (temporary.empty() ? fs::path("/tmp") : temporary) / ("unisono-" + std::to_string(geteuid()));
  make_private(base);
  const std::string path = base + "/" + safe_name(job);
  remove_old(base, path);
  make_private(path);
  return path;
}

}  // namespace unisono
