#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unisono/make_group.h>
#include <unistd.h>

#include <condition_variable>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

namespace unisono::testing {

/// A store for ranks that are threads of this process.
class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::optional<std::string> get(const std::string& key, std::chrono::nanoseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return values_.contains(key); })) return std::nullopt;
    return values_[key];
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    std::lock_guard lock(mutex_);
    return counters_[key] += amount;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::int64_t> counters_;
};

/// A store for ranks that are processes: a file per key in a folder that exists. Values appear whole, by rename.
class FolderStore final : public Store {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, const std::string& value) override {
    const std::string temporary = path(key) + "." + std::to_string(getpid());
    std::ofstream(temporary) << value;
    if (rename(temporary.c_str(), path(key).c_str()) != 0) throw std::runtime_error("cannot set " + key);
  }
  std::optional<std::string> get(const std::string& key, std::chrono::nanoseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    do {
      if (std::ifstream file(path(key)); file) {
        std::ostringstream text;
        text << file.rdbuf();
        return text.str();
      }
      std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < deadline);
    return std::nullopt;
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    const int fd = open((path(key) + ".count").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || flock(fd, LOCK_EX) != 0) throw std::runtime_error("cannot count " + key);
    std::int64_t value = 0;
    if (pread(fd, &value, sizeof value, 0) < 0) throw std::runtime_error("cannot read " + key);
    value += amount;
    if (pwrite(fd, &value, sizeof value, 0) != sizeof value) throw std::runtime_error("cannot write " + key);
    close(fd);
    return value;
  }

 private:
  std::string path(std::string key) const {
    for (char& c : key) c = c == '/' ? '_' : c;
    return folder_ + "/" + key;
  }
  std::string folder_;
};

}  // namespace unisono::testing
