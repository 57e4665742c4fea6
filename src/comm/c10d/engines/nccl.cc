#include "comm/c10d/engines/nccl.h"

#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace unisono {

std::string why_no_nccl() {
  if (c10::cuda::device_count() > 0) return "";
  return "this process sees no GPU (nvidia-smi lists them; CUDA_VISIBLE_DEVICES may hide them). Use the transport "
         "gloo, shm or mpi for CPU memory";
}

c10::intrusive_ptr<c10d::Backend> start_nccl(const EngineStart& start) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = start.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(start.store, start.rank, start.size, std::move(options));
}

}  // namespace unisono
