// MPI_Allreduce of f32 in place, in bursts, as it is told over a unix socket; see launch.py for who tells.
//   mpi_all_reduce SOCKET
// It reads "burst BYTES WARM_UP CALLS" and answers "SECONDS PSS"; it ends when the socket is closed.

#include <mpi.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace {

/// A stream to read from and one to write to; null when nobody listens.
struct Link {
  std::FILE* in = nullptr;
  std::FILE* out = nullptr;
};

Link connect_to(const char* path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return {};
  return {fdopen(fd, "r"), fdopen(dup(fd), "w")};
}

long long proportional_set_size() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  long long kilobytes = 0;
  while (file >> word) {
    if (word == "Pss:" && file >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

void all_reduce(std::vector<float>& data) {
  MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

double burst(std::vector<float>& data, int warm_up, int calls) {
  for (int i = 0; i < warm_up; ++i) all_reduce(data);
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = MPI_Wtime();
  for (int i = 0; i < calls; ++i) all_reduce(data);
  return MPI_Wtime() - begin;
}

bool sums_right(int rank, int size) {
  std::vector<float> data(1000, static_cast<float>(rank + 1));
  all_reduce(data);
  for (float v : data) {
    if (v != static_cast<float>(size * (size + 1) / 2)) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 0, length = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  MPI_Get_library_version(version, &length);
  version[std::strcspn(version, "\n,")] = '\0';
  for (char* c = version; *c; ++c) {
    if (*c == '\t') *c = ' ';
  }
  const Link link = argc > 1 ? connect_to(argv[1]) : Link{};
  if (!link.in || !sums_right(rank, size)) {
    std::fprintf(stderr, link.in ? "MPI_Allreduce gave a wrong sum\n" : "cannot connect to the bench\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  std::fprintf(link.out, "%d %s\n", rank, version);
  std::fflush(link.out);
  char line[256];
  while (std::fgets(line, sizeof(line), link.in)) {
    unsigned long long bytes = 0;
    int warm_up = 0, calls = 0;
    if (std::sscanf(line, "burst %llu %d %d", &bytes, &warm_up, &calls) != 3) break;
    std::vector<float> data(bytes / sizeof(float));
    const double seconds = burst(data, warm_up, calls);
    std::fprintf(link.out, "%.9g %lld\n", seconds, proportional_set_size());
    std::fflush(link.out);
  }
  MPI_Finalize();
  return 0;
}
