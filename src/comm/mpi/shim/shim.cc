// Compiled once per MPI, by CMake or by hand: mpicxx -std=c++20 -O2 -shared -fPIC shim.cc -o libunisono_mpi.so
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include "shim.h"

#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

template <typename T>
T from(MpiHandle handle) {
  static_assert(sizeof(T) <= sizeof(handle.value));
  T out;
  std::memcpy(&out, &handle.value, sizeof out);
  return out;
}

template <typename T>
MpiHandle to(T value) {
  MpiHandle out{0};
  std::memcpy(&out.value, &value, sizeof value);
  return out;
}

MPI_Comm comm_of(MpiHandle handle) { return from<MPI_Comm>(handle); }

// Runs `start` with a place for the request.
template <typename Start>
int begun(MpiHandle* request, Start start) {
  MPI_Request own = MPI_REQUEST_NULL;
  const int code = start(&own);
  *request = to(own);
  return code;
}

// Blocks of bytes at a distance, as a type of which one is one block.
class Blocks {
 public:
  Blocks(int64_t bytes, int64_t stride) {
    MPI_Datatype block = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &block);
    MPI_Type_create_resized(block, 0, static_cast<MPI_Aint>(stride), &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(&block);
  }
  ~Blocks() { MPI_Type_free(&type_); }  // what is in flight keeps it
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  MPI_Datatype type() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

// The MPI that answers may be another than the one whose mpi.h this was compiled with, and its text longer.
int library(char* text, int size) {
  constexpr std::size_t kLongest = 16 * 1024;
  std::vector<char> all(kLongest);
  int length = 0;
  const int code = MPI_Get_library_version(all.data(), &length);
  std::strncpy(text, all.data(), static_cast<std::size_t>(size - 1));
  text[size - 1] = 0;
  return code;
}

int running() {
  int begun = 0, ended = 0;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  return begun && !ended;
}

int start(int* level, int* ours) {
  int begun = 0;
  MPI_Initialized(&begun);
  *ours = !begun;
  const int code = begun ? MPI_Query_thread(level) : MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, level);
  if (code != MPI_SUCCESS) return code;
  *level = *level == MPI_THREAD_MULTIPLE     ? kMpiMultiple
           : *level == MPI_THREAD_SERIALIZED ? kMpiSerialized
           : *level == MPI_THREAD_FUNNELED   ? kMpiFunneled
                                             : kMpiSingle;
  return begun ? MPI_SUCCESS : MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
}

int stop() { return MPI_Finalize(); }
MpiHandle world() { return to<MPI_Comm>(MPI_COMM_WORLD); }
int rank_of(MpiHandle comm, int* rank) { return MPI_Comm_rank(comm_of(comm), rank); }
int size_of(MpiHandle comm, int* size) { return MPI_Comm_size(comm_of(comm), size); }

int duplicate(MpiHandle comm, MpiHandle* copy, MpiHandle* request) {
  static_assert(sizeof(MPI_Comm) <= sizeof(MpiHandle));
  copy->value = 0;
  return begun(request,
               [&](MPI_Request* r) { return MPI_Comm_idup(comm_of(comm), reinterpret_cast<MPI_Comm*>(copy), r); });
}

int return_errors(MpiHandle comm) { return MPI_Comm_set_errhandler(comm_of(comm), MPI_ERRORS_RETURN); }

int release(MpiHandle* comm) {
  MPI_Comm own = comm_of(*comm);
  return MPI_Comm_free(&own);
}

int split(MpiHandle comm, int color, MpiHandle* part) {
  MPI_Comm own = MPI_COMM_NULL;
  const int code = MPI_Comm_split(comm_of(comm), color, 0, &own);
  *part = to(own);
  return code;
}

int all_gather(MpiHandle comm, void* out, int64_t bytes, int64_t stride, MpiHandle* request) {
  const Blocks blocks(bytes, stride);
  return begun(request, [&](MPI_Request* r) {
    return MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, out, 1, blocks.type(), comm_of(comm), r);
  });
}

int all_to_all(MpiHandle comm, const void* in, void* out, int64_t bytes, int64_t stride, MpiHandle* request) {
  const Blocks blocks(bytes, stride);
  return begun(request, [&](MPI_Request* r) {
    return MPI_Ialltoall(in, 1, blocks.type(), out, 1, blocks.type(), comm_of(comm), r);
  });
}

int broadcast(MpiHandle comm, void* data, int64_t bytes, int root, MpiHandle* request) {
  return begun(request, [&](MPI_Request* r) {
    return MPI_Ibcast(data, static_cast<int>(bytes), MPI_BYTE, root, comm_of(comm), r);
  });
}

int test(MpiHandle* request, int* ended) {
  MPI_Request own = from<MPI_Request>(*request);
  const int code = MPI_Test(&own, ended, MPI_STATUS_IGNORE);
  *request = to(own);
  return code;
}

int send(MpiHandle comm, const void* data, int64_t bytes, int to_rank, MpiHandle* request) {
  return begun(request, [&](MPI_Request* r) {
    return MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to_rank, 0, comm_of(comm), r);
  });
}

int receive(MpiHandle comm, void* data, int64_t room, int* sender) {
  int there = 0;
  MPI_Status status;
  MPI_Message message;
  *sender = -1;
  // Matched, for MPICH gives a new communicator the number of an old one, and with it what nobody received there, from
  // ranks that the new one may not have.
  const int code = MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_of(comm), &there, &message, &status);
  if (code != MPI_SUCCESS || !there) return code;
  *sender = status.MPI_SOURCE;
  return MPI_Mrecv(data, static_cast<int>(room), MPI_BYTE, &message, MPI_STATUS_IGNORE);
}

void error_text(int code, char* text, int size) {
  std::vector<char> all(MPI_MAX_ERROR_STRING + 1);
  int length = 0;
  if (MPI_Error_string(code, all.data(), &length) != MPI_SUCCESS) std::strcpy(all.data(), "unknown MPI error");
  std::strncpy(text, all.data(), static_cast<std::size_t>(size - 1));
  text[size - 1] = 0;
}

#ifdef OPEN_MPI
constexpr const char* kBuiltFor = "Open MPI";
#else
constexpr const char* kBuiltFor = "MPICH";  // and its descendants, which share the ABI
#endif

}  // namespace

const MpiShim* unisono_mpi_shim() {
  static const MpiShim shim{kMpiShimVersion, kBuiltFor, library,   running,       start,   stop,      world,
                            rank_of,         size_of,   duplicate, return_errors, release, split,     all_gather,
                            all_to_all,      broadcast, test,      send,          receive, error_text};
  return &shim;
}
