# The transport gloo from C++: torch's own Gloo, whose headers its packages lack. Others' serve for declarations alone (src/comm/c10d/engines/gloo.cc);
# a program that is compiled and run here tells whether they fit. No other Gloo is linked.
function(unisono_check_gloo out)
  find_path(UNISONO_GLOO_INCLUDE gloo/algorithm.h DOC "Folder with Gloo's headers")
  if(NOT UNISONO_GLOO_INCLUDE)
    set(${out} "Gloo's headers are not found (Debian: apt-get install libgloo-dev; elsewhere set UNISONO_GLOO_INCLUDE)" PARENT_SCOPE)
    return()
  endif()
  if(CMAKE_CROSSCOMPILING)
    set(${out} "a cross build cannot run the program that tells whether the headers in ${UNISONO_GLOO_INCLUDE} fit" PARENT_SCOPE)
    return()
  endif()
  set(tried "${TORCH_INSTALL_PREFIX} ${Torch_VERSION} ${UNISONO_GLOO_INCLUDE}")
  if(NOT UNISONO_GLOO_TRIED STREQUAL tried)  # half a minute, once per torch
    message(STATUS "Gloo: trying ${UNISONO_GLOO_INCLUDE} with torch ${Torch_VERSION}")
    unset(unisono_gloo_compiles CACHE)
    unset(unisono_gloo_runs CACHE)
    # By path, for torch's targets name others that do not exist here.
    set(lib ${TORCH_INSTALL_PREFIX}/lib)
    try_run(unisono_gloo_runs unisono_gloo_compiles ${PROJECT_BINARY_DIR}/gloo_smoke SOURCES ${PROJECT_SOURCE_DIR}/cmake/gloo_smoke.cc
            CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${TORCH_INCLUDE_DIRS};${UNISONO_GLOO_INCLUDE}" COMPILE_DEFINITIONS -DUSE_C10D_GLOO
            LINK_LIBRARIES ${lib}/libtorch.so ${lib}/libtorch_cpu.so ${lib}/libc10.so Threads::Threads
            CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
    set(UNISONO_GLOO_TRIED "${tried}" CACHE INTERNAL "What the results of gloo_smoke.cc are about")
  endif()
  if(NOT unisono_gloo_compiles)
    set(${out} "the headers in ${UNISONO_GLOO_INCLUDE} do not compile or link with this torch (cmake/gloo_smoke.cc; the compiler's words are in CMakeFiles/CMakeConfigureLog.yaml)" PARENT_SCOPE)
  elseif(NOT unisono_gloo_runs STREQUAL "0")
    set(${out} "two ranks did not get their sum with the headers in ${UNISONO_GLOO_INCLUDE} and this torch (cmake/gloo_smoke.cc ended with ${unisono_gloo_runs})" PARENT_SCOPE)
  endif()
endfunction()

unisono_choose(gloo with_gloo)
if(with_gloo)
  message(STATUS "Gloo for the transport gloo: torch's, by the headers in ${UNISONO_GLOO_INCLUDE}")
  target_sources(unisono PRIVATE src/comm/c10d/engines/gloo.cc)
  set_source_files_properties(src/comm/c10d/engines/gloo.cc PROPERTIES COMPILE_OPTIONS "-idirafter;${UNISONO_GLOO_INCLUDE}")
else()
  target_sources(unisono PRIVATE src/comm/c10d/engines/no_gloo.cc)
endif()
