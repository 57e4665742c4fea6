#pragma once

#include <stdint.h>

// MPI without mpi.h. Open MPI and MPICH have one API and two ABIs: a communicator is a pointer here and a number there.
// So all that knows an ABI is one small library, compiled once per MPI and loaded at run time; libunisono itself needs
// no MPI.
//
// Functions return 0 or an MPI error code. Sizes are bytes; a block is at most `kMpiLongestBlock`.

constexpr int kMpiShimVersion = 1;
constexpr int64_t kMpiLongestBlock = int64_t{1} << 26;  // also a few times that is an int

extern "C" {

/// An MPI_Comm or MPI_Request, whatever it is.
struct MpiHandle {
  uint64_t value;
};

enum MpiThreadLevel { kMpiSingle, kMpiFunneled, kMpiSerialized, kMpiMultiple };

struct MpiShim {
  int version;            ///< kMpiShimVersion
  const char* built_for;  ///< "Open MPI" or "MPICH"

  int (*library)(char* text, int size);  ///< what MPI says it is; may be called at any time
  int (*running)();                      ///< between MPI_Init and MPI_Finalize
  /// Starts MPI unless it has been (`ours` tells), asking for MPI_THREAD_MULTIPLE; `level` is what there is.
  int (*start)(int* level, int* ours);
  int (*stop)();

  MpiHandle (*world)();
  int (*rank)(MpiHandle comm, int* rank);
  int (*size)(MpiHandle comm, int* size);
  /// A copy, there when `request` has ended.
  int (*duplicate)(MpiHandle comm, MpiHandle* copy, MpiHandle* request);
  int (*return_errors)(MpiHandle comm);
  int (*release)(MpiHandle* comm);
  /// The ranks with this color, in their order. *Blocks*.
  int (*split)(MpiHandle comm, int color, MpiHandle* part);

  /// Every rank's block of `bytes` to `out`, rank r's at r * stride; this rank's is there already.
  int (*all_gather)(MpiHandle comm, void* out, int64_t bytes, int64_t stride, MpiHandle* request);
  /// The blocks of `bytes` at r * stride go to rank r, and come from there.
  int (*all_to_all)(MpiHandle comm, const void* in, void* out, int64_t bytes, int64_t stride, MpiHandle* request);
  int (*broadcast)(MpiHandle comm, void* data, int64_t bytes, int root, MpiHandle* request);
  /// Moves whatever is in flight; whether this has ended. The request is gone then.
  int (*test)(MpiHandle* request, int* ended);

  int (*send)(MpiHandle comm, const void* data, int64_t bytes, int to, MpiHandle* request);
  /// A message that has come: its sender, and its first `room` bytes; a sender of -1 when there is none.
  int (*receive)(MpiHandle comm, void* data, int64_t room, int* from);

  void (*error_text)(int code, char* text, int size);
};

/// The only symbol.
const MpiShim* unisono_mpi_shim();
}
