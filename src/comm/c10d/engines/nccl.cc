#include "comm/c10d/engines/nccl.h"

#include <c10/cuda/CUDAFunctions.h>
#include <nccl.h>
#include <torch/csrc/cuda/nccl.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

// ProcessGroupNCCL::Options has a struct of NCCL's inside, which grows from one NCCL to the next: the header must be of
// the version that torch runs with.

namespace unisono {
namespace {

struct Version {
  std::uint64_t major, minor, patch;
  bool operator==(const Version&) const = default;
  std::string shown() const {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
  }
};

Version of_torch() {
  const std::uint64_t packed = torch::cuda::nccl::version();
  return {packed >> 32, (packed >> 16) & 0xffff, packed & 0xffff};
}

}  // namespace

std::string why_no_nccl() {
  constexpr Version kHeader{NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH};
  if (c10::cuda::device_count() == 0)
    return "this process sees no GPU (nvidia-smi lists them; CUDA_VISIBLE_DEVICES may hide them). Use the transport "
           "gloo, shm or mpi for CPU memory";
  if (of_torch() != kHeader)
    return "this library was built with the header of NCCL " + kHeader.shown() + ", and torch runs with NCCL " +
           of_torch().shown() + "; build it again in this environment";
  return "";
}

c10::intrusive_ptr<c10d::Backend> start_nccl(const EngineStart& start) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = start.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(start.store, start.rank, start.size, std::move(options));
}

}  // namespace unisono
