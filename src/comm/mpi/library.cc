#include "comm/mpi/library.h"

#include <dlfcn.h>
#include <unisono/error.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/env.h"

namespace unisono {
namespace {

constexpr const char* kFile = "libunisono_mpi.so";

// Beside the file that this code is in: libunisono.so, or a program that holds the core.
std::string beside_this() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&beside_this), &info) == 0 || info.dli_fname == nullptr) return kFile;
  const std::string path = info.dli_fname;
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? kFile : path.substr(0, slash + 1) + kFile;
}

struct Loaded {
  const MpiShim* shim = nullptr;
  std::string problem;
};

std::string problem_of(const MpiShim& shim, const std::string& path) {
  if (shim.version != kMpiShimVersion) return path + " belongs to another version of unisono; build it again";
  std::array<char, 4096> text{};
  shim.library(text.data(), static_cast<int>(text.size()));
  const std::string there(text.data(), std::min<std::size_t>(60, std::string(text.data()).find_first_of(",\n")));
  const bool open_mpi = there.starts_with("Open MPI");
  if (open_mpi == (std::string(shim.built_for) == "Open MPI")) return "";
  return path + " was built for " + shim.built_for + ", and the MPI in this process is " + there +
         ". Build it with that MPI's mpicxx, or set UNISONO_MPI_LIBRARY to one that was";
}

// Global symbols: plugins of some MPIs look for the MPI they belong to among them.
Loaded load() {
  const auto named = env_string("UNISONO_MPI_LIBRARY");
  const std::string path = named.value_or(beside_this());
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    const std::string why = dlerror();
    return {nullptr, "MPI is not built in: " + why +
                         ". Install an MPI (Debian: apt-get install libopenmpi-dev) and build unisono again, or set "
                         "UNISONO_MPI_LIBRARY to a libunisono_mpi.so built with your MPI's mpicxx"};
  }
  const auto get = reinterpret_cast<const MpiShim* (*)()>(dlsym(library, "unisono_mpi_shim"));
  if (!get) return {nullptr, path + " is not a libunisono_mpi.so"};
  const MpiShim* shim = get();
  return {shim, problem_of(*shim, path)};
}

const Loaded& loaded() {
  static const Loaded once = load();
  return once;
}

const char* name_of(int level) {
  constexpr const char* kNames[] = {"MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED",
                                    "MPI_THREAD_MULTIPLE"};
  return kNames[level];
}

MpiLibrary* started = nullptr;  // set once, under the lock of instance()'s static

}  // namespace

std::string MpiLibrary::why_not() { return loaded().problem; }

bool MpiLibrary::launched() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "PMI_RANK", "SLURM_PROCID"})
    if (env_string(name)) return true;
  return loaded().shim && loaded().problem.empty() && loaded().shim->running();
}

MpiLibrary& MpiLibrary::instance() {
  static MpiLibrary* const once = [] {
    if (!loaded().problem.empty()) throw Error(ErrorCode::invalid_argument, loaded().problem);
    started = new MpiLibrary(loaded().shim);
    if (started->ours_) std::atexit(at_exit);
    return started;
  }();
  return *once;
}

MpiLibrary::MpiLibrary(const MpiShim* shim) : shim_(shim) {
  int level = 0, ours = 0;
  if (const int code = shim_->start(&level, &ours)) fail("MPI_Init_thread", code);
  ours_ = ours != 0;
  if (level < kMpiSerialized)
    throw Error(ErrorCode::invalid_argument,
                std::string("this MPI was started with ") + name_of(level) +
                    ", and a group calls it from a thread of its own. " +
                    (ours ? "This MPI has no more; install one that has MPI_THREAD_MULTIPLE."
                          : "Call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave the start to unisono."));
}

// What a failed call has left in flight may have ended since, or be about to.
bool MpiLibrary::quiet() {
  std::erase_if(left_, [this](MpiHandle& request) {
    int ended = 0;
    return shim_->test(&request, &ended) != 0 || ended != 0;
  });
  return left_.empty() && in_flight_ == 0;
}

void MpiLibrary::at_exit() {
  constexpr auto kPatience = std::chrono::milliseconds(500);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  const std::lock_guard lock(started->mutex_);
  if (!started->shim_->running()) return;
  bool quiet = started->quiet();
  while (!quiet && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    quiet = started->quiet();
  }
  if (quiet) started->shim_->stop();
}

void MpiLibrary::require_running(const char* what) const {
  if (!shim_->running())
    throw Error(ErrorCode::invalid_argument, std::string(what) + " after MPI_Finalize: end the groups before MPI");
}

void MpiLibrary::fail(const char* what, int code) const {
  std::array<char, 1024> text{};
  shim_->error_text(code, text.data(), static_cast<int>(text.size()));
  throw Error(ErrorCode::internal, std::string(what) + ": " + text.data());
}

MpiTransfer::MpiTransfer(MpiLibrary& library, const char* what, std::size_t bytes)
    : library_(library), what_(what), memory_(std::make_unique_for_overwrite<std::byte[]>(bytes)) {}

MpiTransfer::~MpiTransfer() {
  if (requests_.empty()) return;
  static_cast<void>(memory_.release());
  const std::lock_guard lock(library_.mutex_);
  library_.in_flight_ -= static_cast<int>(requests_.size());
  library_.left_.insert(library_.left_.end(), requests_.begin(), requests_.end());
}

void MpiTransfer::begun(MpiHandle request) {
  const std::lock_guard lock(library_.mutex_);
  ++library_.in_flight_;
  requests_.push_back(request);
}

bool MpiTransfer::done() {
  if (requests_.empty()) return true;
  const std::lock_guard lock(library_.mutex_);
  library_.require_running(what_);
  const auto ended_now = std::erase_if(requests_, [this](MpiHandle& request) {
    int ended = 0;
    const int code = library_.shim_->test(&request, &ended);
    if (code != 0 && code_ == 0) code_ = code;
    return code != 0 || ended != 0;
  });
  library_.in_flight_ -= static_cast<int>(ended_now);
  return requests_.empty();
}

void MpiTransfer::check() const {
  if (code_ != 0) library_.fail(what_, code_);
}

}  // namespace unisono
