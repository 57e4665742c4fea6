#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/reduce_kernels.h"
#include "comm/shm/shm_group.h"
#include "comm/test_store.h"

// A quick look at the shared-memory transport without torch: `shm_quick [ranks]`. Ranks are this program started again.
// The limit is a bare loop in which each rank reads its slice of all copies and writes it to all copies, without any
// synchronisation. Rank 0 prints its median and minimum in microseconds.

namespace {

using namespace unisono;

struct Samples {
  std::vector<double> us;
  void print(const std::string& name) {
    std::sort(us.begin(), us.end());
    std::printf("%-28s median %10.2f us   min %10.2f us   n %zu\n", name.c_str(), us[us.size() / 2], us[0], us.size());
    std::fflush(stdout);
  }
};

Samples time_calls(ProcessGroup& group, int repeats, const std::function<void()>& call) {
  for (int i = 0; i < 3 + repeats / 10; ++i) call();
  Samples s;
  group.barrier().wait();
  for (int i = 0; i < repeats; ++i) {
    const auto begin = now_ns();
    call();
    s.us.push_back(static_cast<double>(now_ns() - begin) / 1e3);
  }
  group.barrier().wait();
  return s;
}

float* map_shared(int fd, std::size_t bytes) {
  return static_cast<float*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0));
}

void run_limit(ProcessGroup& group, int fd, std::size_t bytes, int repeats) {
  const auto n = static_cast<std::size_t>(group.size());
  float* all = map_shared(fd, n * bytes);
  const std::size_t count = bytes / sizeof(float) / n;
  std::vector<void*> slices;
  for (std::size_t r = 0; r < n; ++r) {
    slices.push_back(all + r * bytes / sizeof(float) + count * static_cast<std::size_t>(group.rank()));
  }
  const std::vector<const void*> inputs(slices.begin(), slices.end());
  auto s = time_calls(group, repeats, [&] { tree_reduce(inputs, slices, count, Dtype::f32, ReduceOp::sum, 1); });
  if (group.rank() == 0) s.print("limit " + std::to_string(bytes));
  munmap(all, n * bytes);
}

int rank_main(int rank, int size, const std::string& folder, int fd) {
  auto store = std::make_shared<testing::FolderStore>(folder);
  auto group = make_shm_group({.rank = rank, .size = size, .store = store});
  const auto report = [&](Samples s, const std::string& name) {
    if (rank == 0) s.print(name);
  };
  report(time_calls(*group, 20000, [&] { group->barrier().wait(); }), "barrier");
  for (const std::size_t bytes :
       {std::size_t{4} << 10, std::size_t{64} << 10, std::size_t{1} << 20, std::size_t{25} << 20}) {
    const int repeats = bytes <= 65536 ? 10000 : bytes <= (1 << 20) ? 500 : 40;
    if (bytes * static_cast<std::size_t>(size) >= 65536) run_limit(*group, fd, bytes, repeats);
    Buffer shared = group->allocate(bytes);
    Buffer floats{.data = shared.data, .count = bytes / 4, .dtype = Dtype::f32, .owner = shared.owner};
    report(time_calls(*group, repeats, [&] { group->all_reduce(floats).wait(); }), "in place " + std::to_string(bytes));
    std::vector<float> own(bytes / 4, 1.0f);
    Buffer ordinary{.data = own.data(), .count = own.size(), .dtype = Dtype::f32};
    report(time_calls(*group, repeats, [&] { group->all_reduce(ordinary).wait(); }), "staged " + std::to_string(bytes));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 6) return rank_main(std::atoi(argv[2]), std::atoi(argv[3]), argv[4], std::atoi(argv[5]));
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  std::string folder = (std::filesystem::temp_directory_path() / "shm_quick_XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return 1;
  const int fd = memfd_create("limit", 0);
  if (ftruncate(fd, static_cast<off_t>(size) * (25 << 20)) != 0) return 1;
  std::printf("%d ranks\n", size);
  std::fflush(stdout);
  std::vector<pid_t> children;
  for (int r = 0; r < size; ++r) {
    const pid_t pid = fork();
    if (pid == 0) {
      const std::string rank = std::to_string(r), ranks = std::to_string(size), descriptor = std::to_string(fd);
      execl("/proc/self/exe", argv[0], "rank", rank.c_str(), ranks.c_str(), folder.c_str(), descriptor.c_str(),
            nullptr);
      _exit(127);
    }
    children.push_back(pid);
  }
  int bad = 0;
  for (const pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    bad |= status;
  }
  std::filesystem::remove_all(folder);
  return bad != 0;
}
