# The transport nccl from C++: the one of a torch for CUDA. The headers it needs, NCCL's and CUDA's, come with the packages that pip installs beside such a
# torch (but for two small ones, cuda-toolkit[crt,cccl]), or with a CUDA toolkit; the source is compiled here to see whether they are all there. No CUDA compiler is needed.
# Leaves the folders with the headers in the cache.
function(unisono_check_nccl out)
  if(NOT EXISTS ${TORCH_INSTALL_PREFIX}/lib/libtorch_cuda.so)
    set(${out} "torch ${Torch_VERSION} in ${TORCH_INSTALL_PREFIX} is none for CUDA" PARENT_SCOPE)
    return()
  endif()
  get_filename_component(beside ${TORCH_INSTALL_PREFIX} DIRECTORY)
  file(GLOB folders ${beside}/nvidia/*/include)
  find_path(UNISONO_NCCL_INCLUDE nccl.h HINTS ${folders} DOC "Folder with NCCL's header, of the version in torch")
  find_path(UNISONO_CUDA_INCLUDE cusparse.h HINTS ${folders} ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include DOC "Folder with CUDA's headers")
  if(NOT UNISONO_NCCL_INCLUDE OR NOT UNISONO_CUDA_INCLUDE)
    string(CONCAT problem "nccl.h and cusparse.h are not both found; pip's packages of torch bring them in ${beside}/nvidia, else set "
                          "UNISONO_NCCL_INCLUDE and UNISONO_CUDA_INCLUDE")
    set(${out} "${problem}" PARENT_SCOPE)
    return()
  endif()
  set(all ${UNISONO_NCCL_INCLUDE} ${UNISONO_CUDA_INCLUDE} ${folders})
  list(REMOVE_DUPLICATES all)
  set(UNISONO_NCCL_INCLUDES "${all}" CACHE INTERNAL "Folders with the headers that nccl.cc needs")
  set(tried "${TORCH_INSTALL_PREFIX} ${Torch_VERSION} ${all}")
  if(NOT UNISONO_NCCL_TRIED STREQUAL tried)
    message(STATUS "NCCL: trying ${UNISONO_NCCL_INCLUDE} and ${UNISONO_CUDA_INCLUDE} with torch ${Torch_VERSION}")
    unset(unisono_nccl_compiles CACHE)
    set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
    try_compile(unisono_nccl_compiles ${PROJECT_BINARY_DIR}/nccl_smoke SOURCES ${PROJECT_SOURCE_DIR}/src/comm/c10d/engines/nccl.cc
                CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR}/include;${PROJECT_SOURCE_DIR}/src;${TORCH_INCLUDE_DIRS};${all}"
                COMPILE_DEFINITIONS -DUSE_C10D_NCCL -DUSE_DISTRIBUTED CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
    set(UNISONO_NCCL_TRIED "${tried}" CACHE INTERNAL "What the result of compiling nccl.cc is about")
  endif()
  if(NOT unisono_nccl_compiles)
    string(CONCAT problem "src/comm/c10d/engines/nccl.cc does not compile with the headers in ${UNISONO_NCCL_INCLUDE} and ${UNISONO_CUDA_INCLUDE}; where "
                          "pip has installed torch, some of them want more: pip install 'cuda-toolkit[crt,cccl]' of the version that is there (the "
                          "compiler's words are in CMakeFiles/CMakeConfigureLog.yaml)")
    set(${out} "${problem}" PARENT_SCOPE)
  endif()
endfunction()

unisono_choose(nccl with_nccl)
if(with_nccl)
  message(STATUS "NCCL for the transport nccl: torch's, by the header in ${UNISONO_NCCL_INCLUDE}")
  target_sources(unisono PRIVATE src/comm/c10d/engines/nccl.cc)
  set(options ${UNISONO_NCCL_INCLUDES})
  list(TRANSFORM options PREPEND "-idirafter;")
  set_source_files_properties(src/comm/c10d/engines/nccl.cc PROPERTIES COMPILE_OPTIONS "${options}")
else()
  target_sources(unisono PRIVATE src/comm/c10d/engines/no_nccl.cc)
endif()
