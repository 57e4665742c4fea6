#include "comm/mpi/mpi_group.h"

#include <algorithm>
#include <utility>

#include "comm/issuer/issued_group.h"

namespace unisono {
namespace {

std::string rank_of(int rank, int size) { return "rank " + std::to_string(rank) + " of " + std::to_string(size); }

void check_world(MpiLibrary& library, const GroupOptions& options) {
  int rank = 0, size = 1;
  library.call("MPI_Comm_rank", [&](const MpiShim& mpi) { return mpi.rank(library.world(), &rank); });
  library.call("MPI_Comm_size", [&](const MpiShim& mpi) { return mpi.size(library.world(), &size); });
  if (options.size == 1 || (options.rank == rank && options.size == size)) return;
  std::string text = "unisono mpi group: the options or the environment say " + rank_of(options.rank, options.size) +
                     ", and MPI says " + rank_of(rank, size) + ".";
  if (size == 1)
    text +=
        " MPI was not started by its own launcher: use the mpirun of the same MPI, or with Slurm srun --mpi=pmix (or "
        "pmi2).";
  throw Error(ErrorCode::invalid_argument, text);
}

}  // namespace

std::string why_not_mpi(const GroupOptions& options) {
  if (auto reason = MpiLibrary::why_not(); !reason.empty()) return reason;
  if (options.size > 1 && !MpiLibrary::launched()) return "this process was not started by mpirun, mpiexec or srun";
  return "";
}

std::shared_ptr<ProcessGroup> make_mpi_group(MpiLibrary& library, MpiHandle parent, const MpiEngineOptions& options) {
  return std::make_shared<IssuedGroup>(std::make_unique<MpiEngine>(library, parent, options));
}

std::shared_ptr<ProcessGroup> make_mpi_group_over_hosts(MpiLibrary& library, MpiHandle parent,
                                                        const MpiEngineOptions& options, const OpenHostStore& open) {
  auto flat = std::make_unique<MpiEngine>(library, parent, options);
  const auto make = [&, rank = flat->info().rank](const std::string&,
                                                  const std::vector<int>& ranks) -> std::unique_ptr<Engine> {
    const bool member = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    MpiHandle part{};
    library.call("MPI_Comm_split", [&](const MpiShim& mpi) { return mpi.split(parent, member ? 0 : 1, &part); });
    auto engine = member ? std::make_unique<MpiEngine>(library, part, options) : nullptr;
    library.call("MPI_Comm_free", [&](const MpiShim& mpi) { return mpi.release(&part); });
    return engine;
  };
  return make_over_hosts(std::move(flat), make, open, options.start_timeout);
}

std::shared_ptr<ProcessGroup> make_mpi_group(const GroupOptions& options) {
  MpiLibrary& library = MpiLibrary::instance();
  check_world(library, options);
  return make_mpi_group(library, library.world(), {.timeout = options.timeout, .start_timeout = options.start_timeout});
}

std::shared_ptr<ProcessGroup> make_mpi_group_over_hosts(const GroupOptions& options, const OpenHostStore& open) {
  MpiLibrary& library = MpiLibrary::instance();
  check_world(library, options);
  return make_mpi_group_over_hosts(library, library.world(),
                                   {.timeout = options.timeout, .start_timeout = options.start_timeout}, open);
}

}  // namespace unisono
