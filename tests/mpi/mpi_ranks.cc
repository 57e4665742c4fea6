#include "mpi/mpi_ranks.h"

#include <map>
#include <thread>

#include "comm/mpi/mpi_group.h"

namespace unisono::testing {
namespace {

// The ranks of `comm` wait for one another, under a deadline.
void meet(MpiHandle comm, int rank, int size) {
  MpiTransfer all(MpiLibrary::instance(), "meeting", static_cast<std::size_t>(size));
  all.data()[rank] = std::byte{1};
  all.start([&](const MpiShim& mpi, MpiHandle* request) { return mpi.all_gather(comm, all.data(), 1, 1, request); });
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!all.done()) {
    require(std::chrono::steady_clock::now() < end, "the other ranks never came to the meeting");
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  all.check();
}

}  // namespace

MpiWorld mpi_world() {
  MpiLibrary& library = MpiLibrary::instance();
  MpiWorld world;
  library.call("rank", [&](const MpiShim& mpi) { return mpi.rank(library.world(), &world.rank); });
  library.call("size", [&](const MpiShim& mpi) { return mpi.size(library.world(), &world.size); });
  return world;
}

MpiHandle first_ranks(int size) {
  static std::map<int, MpiHandle> known;
  const auto [place, fresh] = known.try_emplace(size);
  if (fresh) {
    MpiLibrary& library = MpiLibrary::instance();
    const int color = mpi_world().rank < size ? 0 : 1;
    library.call("split", [&](const MpiShim& mpi) { return mpi.split(library.world(), color, &place->second); });
  }
  return place->second;
}

Transport mpi_transport(const std::string& name, std::size_t longest_block) {
  const MpiWorld world = mpi_world();
  Transport out{.name = name, .max_ranks = world.size};
  out.world = [longest_block](int size, std::chrono::nanoseconds) -> Maker {
    return [parent = first_ranks(size), longest_block](const GroupOptions& options) {
      return make_mpi_group(MpiLibrary::instance(), parent,
                            {.timeout = options.timeout, .start_timeout = options.start_timeout, .longest_block = longest_block});
    };
  };
  out.own_rank = world.rank;
  out.meeting = [world](int size) -> std::function<void()> {
    return [comm = first_ranks(size), world, size] { meet(comm, world.rank, size); };
  };
  return out;
}

}  // namespace unisono::testing
