#include "comm/c10d/engines/nccl.h"

namespace unisono {

std::string why_no_nccl() {
  return "this library was built without NCCL. Build it against a torch for CUDA, with the headers that such a torch's "
         "own packages bring "
         "(nccl.h and cuda_runtime.h) and -DUNISONO_NCCL=ON; or use the transport gloo, shm or mpi for CPU memory";
}

c10::intrusive_ptr<c10d::Backend> start_nccl(const EngineStart&) {
  throw Error(ErrorCode::invalid_argument, why_no_nccl());
}

}  // namespace unisono
