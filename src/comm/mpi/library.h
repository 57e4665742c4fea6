#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi/shim/shim.h"

namespace unisono {

/// The MPI of this process, behind its shim. There is one MPI per process, so there is one of these; it is never
/// destroyed, for groups that live in globals may end after it would be.
///
/// MPI is finalized at exit when it was started here: `atexit`, because groups come and go and MPI cannot be started
/// twice. Not while something is still in flight, as after a failure: then MPI_Finalize might wait for ever, and the
/// launcher tells that instead.
///
/// *Threads*: any; calls are made one at a time, so that MPI_THREAD_SERIALIZED suffices.
class MpiLibrary {
 public:
  /// Why MPI cannot be used here, and what to do; empty when it can. Loads the shim, does not start MPI.
  static std::string why_not();
  /// Whether mpirun, mpiexec or srun started this process, or the program has started MPI itself.
  static bool launched();
  /// Loads and starts it. *Throws* `invalid_argument`.
  static MpiLibrary& instance();

  MpiHandle world() const { return shim_->world(); }
  /// Calls a function of the shim. *Throws* `internal` naming `what` and MPI's own text.
  template <typename Call>
  void call(const char* what, Call body) {
    const std::lock_guard lock(mutex_);
    require_running(what);
    if (const int code = body(*shim_)) fail(what, code);
  }

 private:
  friend class MpiTransfer;
  explicit MpiLibrary(const MpiShim* shim);
  static void at_exit();
  bool quiet();
  void require_running(const char* what) const;
  [[noreturn]] void fail(const char* what, int code) const;

  const MpiShim* shim_;
  std::mutex mutex_;
  bool ours_ = false;
  int in_flight_ = 0;            // requests of transfers that live
  std::vector<MpiHandle> left_;  // requests of transfers that are gone
};

/// Memory that MPI reads or writes until its requests have ended. What MPI has been given cannot be taken back, so when
/// a call fails, or the group goes, the memory of those that have not ended is left to MPI for good. *Threads*: one.
class MpiTransfer {
 public:
  MpiTransfer(MpiLibrary& library, const char* what, std::size_t bytes);
  ~MpiTransfer();
  MpiTransfer(const MpiTransfer&) = delete;
  MpiTransfer& operator=(const MpiTransfer&) = delete;

  std::byte* data() { return memory_.get(); }
  /// Starts a request: `body(shim, request)` calls one function of the shim.
  template <typename Body>
  void start(Body body) {
    MpiHandle request{};
    library_.call(what_, [&](const MpiShim& shim) { return body(shim, &request); });
    begun(request);
  }
  /// Lets MPI work. Whether all requests have ended, well or not.
  bool done();
  /// *Throws* what went wrong.
  void check() const;

 private:
  void begun(MpiHandle request);

  MpiLibrary& library_;
  const char* what_;
  std::unique_ptr<std::byte[]> memory_;
  std::vector<MpiHandle> requests_;  // that have not ended
  int code_ = 0;
};

}  // namespace unisono
