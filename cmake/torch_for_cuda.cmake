# A torch for CUDA, described by hand. Its own package file stops where nvcc and the libraries of a whole CUDA toolkit are not installed, which pip's
# packages do not bring; this source has no CUDA code and needs none of them. Sets what find_package(Torch) would, and makes the target torch.
#   unisono_torch_for_cuda(PREFIX)     PREFIX: the folder with lib/libtorch_cuda.so
function(unisono_torch_for_cuda prefix)
  include(${prefix}/share/cmake/Torch/TorchConfigVersion.cmake)
  set(Torch_VERSION ${PACKAGE_VERSION} PARENT_SCOPE)
  set(Torch_FOUND TRUE PARENT_SCOPE)
  set(TORCH_INSTALL_PREFIX ${prefix} PARENT_SCOPE)
  set(includes ${prefix}/include ${prefix}/include/torch/csrc/api/include)
  set(TORCH_INCLUDE_DIRS ${includes} PARENT_SCOPE)
  foreach(name torch_cpu torch_cuda c10 c10_cuda)
    add_library(${name} SHARED IMPORTED)
    set_target_properties(${name} PROPERTIES IMPORTED_LOCATION ${prefix}/lib/lib${name}.so)
  endforeach()
  # The two by full names: what registers itself at load must be loaded although nothing of it is called.
  add_library(torch SHARED IMPORTED)
  set_target_properties(torch PROPERTIES
    IMPORTED_LOCATION ${prefix}/lib/libtorch.so
    INTERFACE_INCLUDE_DIRECTORIES "${includes}"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_C10D_NCCL;USE_RPC;USE_TENSORPIPE"
    INTERFACE_LINK_LIBRARIES
      "-Wl,--no-as-needed,\"${prefix}/lib/libtorch_cpu.so\",\"${prefix}/lib/libtorch_cuda.so\" -Wl,--as-needed;torch_cpu;torch_cuda;c10_cuda;c10")
endfunction()
