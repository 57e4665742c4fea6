#include "mpi/mpi_ranks.h"

#include <cstdlib>
#include <filesystem>
#include <map>
#include <thread>

#include "comm/mpi/mpi_group.h"
#include "comm/test_store.h"

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

namespace {

using MakeMpiGroup = std::function<std::shared_ptr<ProcessGroup>(MpiHandle parent, const GroupOptions& options)>;

Transport transport_of(const std::string& name, const MakeMpiGroup& make) {
  const MpiWorld world = mpi_world();
  Transport out{.name = name, .max_ranks = world.size};
  out.world = [make](int size, std::chrono::nanoseconds) -> Maker {
    return [make, parent = first_ranks(size)](const GroupOptions& options) { return make(parent, options); };
  };
  out.own_rank = world.rank;
  out.meeting = [world](int size) -> std::function<void()> {
    return [comm = first_ranks(size), world, size] { meet(comm, world.rank, size); };
  };
  return out;
}

// Where the ranks of a host meet; its first rank removes it at the end of the program.
std::shared_ptr<Store> host_store(const std::string& name, bool first) {
  const auto path = std::filesystem::temp_directory_path() / ("unisono-mpi-test-" + name);
  static std::vector<std::shared_ptr<const void>> removed;
  std::filesystem::create_directories(path);
  if (first) removed.emplace_back(nullptr, [path](const void*) { std::filesystem::remove_all(path); });
  return std::make_shared<FolderStore>(path.string());
}

}  // namespace

Transport mpi_transport(const std::string& name, std::size_t longest_block) {
  return transport_of(name, [longest_block](MpiHandle parent, const GroupOptions& options) {
    return make_mpi_group(
        MpiLibrary::instance(), parent,
        {.timeout = options.timeout, .start_timeout = options.start_timeout, .longest_block = longest_block});
  });
}

Transport mpi_transport_over_hosts(const std::string& name, const std::string& parts) {
  return transport_of(name, [parts](MpiHandle parent, const GroupOptions& options) {
    const auto rank = static_cast<std::size_t>(mpi_world().rank);
    setenv("UNISONO_HOST_PART", parts.substr(rank % parts.size(), 1).c_str(), 1);
    return make_mpi_group_over_hosts(MpiLibrary::instance(), parent,
                                     {.timeout = options.timeout, .start_timeout = options.start_timeout}, host_store);
  });
}

}  // namespace unisono::testing
