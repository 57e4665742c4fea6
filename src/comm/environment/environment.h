#pragma once

#include <unisono/init.h>

#include <functional>
#include <optional>
#include <string>

namespace unisono {

/// Looks an environment variable up; empty when it is not set. A function, so that tests need not touch the real one.
using Lookup = std::function<std::optional<std::string>(const std::string&)>;
Lookup process_environment();

/// What `init()` has understood: who this process is, and where the ranks find each other.
struct Environment {
  enum class Source { none, arguments, variables, open_mpi, mpich, slurm };
  enum class Meeting {
    none,         ///< a world of one needs no store
    given,        ///< `InitOptions::store`
    agent_store,  ///< torchrun hosts a TCPStore, all ranks are its clients
    tcp,          ///< rank 0 hosts a TCPStore at host:port
    file,         ///< a FileStore at `path`
    job_file,     ///< a FileStore in a private directory, named after the launcher's job
    mpi,          ///< MPI itself: asked for by name, or its launcher spans several hosts and tells no address
  };

  Source source = Source::none;
  Meeting meeting = Meeting::none;
  int rank = 0;
  int size = 1;
  std::string host;
  int port = 0;
  std::string path;    ///< of `file`
  std::string job;     ///< of `job_file`, and of srun's `tcp`: the same on all ranks of a job, and on no others
  std::string circle;  ///< what this job's keys begin with: of srun's step, UNISONO_JOB, UNISONO_SECRET; empty without
  bool several_hosts =
      false;        ///< as the launcher or UNISONO_HOST_PART tells; which ranks share a host is for them to find out
  int attempt = 0;  ///< torchrun's restart count; separates the keys of one agent store
  std::string evidence;  ///< the variables it was read from with their values: "RANK=1 WORLD_SIZE=2"
};

/// Reads it in the order that init.h documents. Local; asks the process's parent only for a job without a name.
/// *Throws* `invalid_argument` naming the variables, their values and what to do.
Environment read_environment(const InitOptions& options, const Lookup& lookup);

/// One line for people.
std::string describe(const Environment& environment);

}  // namespace unisono
