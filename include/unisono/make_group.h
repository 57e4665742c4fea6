#pragma once

#include <unisono/process_group.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace unisono {

/// Where ranks find each other at start: a small key-value store that all of them reach. We write none of our own;
/// `init()` wraps a c10d TCPStore or FileStore.
/// *Threads*: used from one thread at a time; by groups of "gloo" and "nccl", which keep it while they live, from
/// threads of their own too.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// The value once it is there; empty optional when `timeout` passes first. *Blocks*.
  virtual std::optional<std::string> get(const std::string& key, std::chrono::nanoseconds timeout) = 0;
  /// Adds to a counter (0 at first) and returns the new value; atomic over ranks.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
};

struct GroupOptions {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Store> store = nullptr;                            ///< needed when size > 1, but for "mpi"
  std::chrono::nanoseconds timeout = std::chrono::minutes(30);       ///< of every call that names none
  std::chrono::nanoseconds start_timeout = std::chrono::minutes(5);  ///< for all ranks to turn up
  /// Of the keys in the store. Groups with other ranks on the same store need one each; the same ranks may use one
  /// again, and so make the next group, whether or not the one before still lives.
  std::string prefix = "unisono";
};

/// Whether a transport can serve these options on this machine, and if not, why and what to do.
struct Viability {
  std::string transport;
  bool viable = false;
  std::string reason;  ///< why not; empty when viable
};

/// Every transport this build knows, in order of preference, judged without contacting a peer.
std::vector<Viability> viable_transports(const GroupOptions& options);

/// Makes a group. `transport` is
/// - "auto": the first viable one, "nccl" excepted;
/// - "serial": a world of one;
/// - "shm": ranks on one host;
/// - "mpi": the processes that mpirun, mpiexec or srun has started; needs no store, and with a size of 1 MPI is asked
///   for rank and size;
/// - "gloo": ranks anywhere, through torch's Gloo, on the interfaces of GLOO_SOCKET_IFNAME or the one that the host's
///   name resolves to;
/// - "nccl": CUDA memory alone, through torch's NCCL, on the calling thread's present device.
/// The last two are as `make_c10d_group` describes, and in builds that have found their headers (`viable_transports`
/// says). *Collective*. *Blocks* until all ranks are there, at most `start_timeout`.
/// *Throws* `invalid_argument` (unknown or not viable transport, bad rank or size, a rank claimed twice: names both
/// pids), `timeout` (names the ranks that are missing, or says that an engine did not start).
std::shared_ptr<ProcessGroup> make_group(const std::string& transport, const GroupOptions& options);

}  // namespace unisono
