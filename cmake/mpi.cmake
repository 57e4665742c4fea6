# The one library that knows an MPI's ABI, loaded at run time (src/comm/mpi/library.cc), by that MPI's own compiler; for another MPI the same command by hand:
#   mpicxx -std=c++20 -O2 -shared -fPIC src/comm/mpi/shim/shim.cc -o libunisono_mpi.so     and UNISONO_MPI_LIBRARY names it
# CMake's FindMPI is not asked: it ends the configuration where an MPI is broken, or was removed since the last one.
set(shim ${PROJECT_SOURCE_DIR}/src/comm/mpi/shim)
set(mpi_flags -std=c++20 -O2 -Wall -Wextra -shared -fPIC)

function(unisono_check_mpi out)
  if(UNISONO_MPICXX AND NOT EXISTS "${UNISONO_MPICXX}")
    unset(UNISONO_MPICXX CACHE)
  endif()
  find_program(UNISONO_MPICXX NAMES mpicxx mpic++ HINTS ${MPI_HOME} ENV MPI_HOME PATH_SUFFIXES bin DOC "An MPI's C++ compiler")
  if(NOT UNISONO_MPICXX)
    set(${out} "no mpicxx is found (Debian: apt-get install libopenmpi-dev; elsewhere set MPI_HOME or UNISONO_MPICXX)" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${UNISONO_MPICXX} ${mpi_flags} ${shim}/shim.cc -o ${PROJECT_BINARY_DIR}/CMakeFiles/mpi_smoke.so
                  RESULT_VARIABLE failed OUTPUT_VARIABLE words ERROR_VARIABLE words)
  if(NOT failed STREQUAL "0")
    string(STRIP "${failed}\n${words}" words)
    set(${out} "${UNISONO_MPICXX} does not compile ${shim}/shim.cc; mend that MPI, or set MPI_HOME or UNISONO_MPICXX to another. Its words: ${words}" PARENT_SCOPE)
  endif()
endfunction()

unisono_choose(mpi with_mpi)
if(with_mpi)
  message(STATUS "MPI for the transport mpi: ${UNISONO_MPICXX}")
  set(mpi_library ${PROJECT_BINARY_DIR}/libunisono_mpi.so)
  add_custom_command(OUTPUT ${mpi_library} COMMAND ${UNISONO_MPICXX} ${mpi_flags} ${shim}/shim.cc -o ${mpi_library}
                     DEPENDS ${shim}/shim.cc ${shim}/shim.h ${UNISONO_MPICXX} VERBATIM COMMENT "Building libunisono_mpi.so with ${UNISONO_MPICXX}")
  add_custom_target(unisono_mpi ALL DEPENDS ${mpi_library})
else()
  file(REMOVE ${PROJECT_BINARY_DIR}/libunisono_mpi.so)  # of an MPI that is gone
endif()
