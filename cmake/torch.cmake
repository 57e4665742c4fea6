# Finds libtorch: CMAKE_PREFIX_PATH or Torch_DIR first, else the torch package of the Python on the path.
if(NOT DEFINED Torch_DIR AND NOT CMAKE_PREFIX_PATH)
  find_package(Python3 COMPONENTS Interpreter)
  if(Python3_FOUND)
    execute_process(COMMAND ${Python3_EXECUTABLE} -c "import torch; print(torch.utils.cmake_prefix_path)"
                    OUTPUT_VARIABLE torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(APPEND CMAKE_PREFIX_PATH ${torch_prefix})
  endif()
endif()
find_package(Torch QUIET)
if(NOT Torch_FOUND)
  message(FATAL_ERROR "libtorch was not found. Install it with\n  pip install torch==${UNISONO_TORCH_VERSION}.0\n"
          "and pass -DCMAKE_PREFIX_PATH=\$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')")
endif()
if(NOT Torch_VERSION MATCHES "^${UNISONO_TORCH_VERSION}\\.")
  message(FATAL_ERROR "unisono is written against torch ${UNISONO_TORCH_VERSION}, found ${Torch_VERSION}. "
          "Install that one:\n  pip install torch==${UNISONO_TORCH_VERSION}.0")
endif()
