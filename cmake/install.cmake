# What an outside project needs: headers, the library, and find_package(unisono). All destinations are relative, so that the
# same rules fill a prefix (`cmake --install`) and the folder of the Python package (the wheel).
include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/unisono)

# Beside torch in site-packages, and without pip wherever torch was at build time.
set(library_rpath "$ORIGIN/../../torch/lib")
if(NOT SKBUILD)
  list(APPEND library_rpath ${TORCH_INSTALL_PREFIX}/lib)
endif()
set_target_properties(unisono PROPERTIES INSTALL_RPATH "${library_rpath}")

install(TARGETS unisono EXPORT unisonoTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
if(TARGET unisono_mpi)
  install(PROGRAMS ${mpi_library} DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
endif()
install(DIRECTORY include/unisono DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp)
install(EXPORT unisonoTargets NAMESPACE unisono:: DESTINATION ${config_dir} COMPONENT cpp)

configure_package_config_file(cmake/unisonoConfig.cmake.in ${PROJECT_BINARY_DIR}/unisonoConfig.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/unisonoConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/unisonoConfig.cmake ${PROJECT_BINARY_DIR}/unisonoConfigVersion.cmake
        DESTINATION ${config_dir} COMPONENT cpp)
