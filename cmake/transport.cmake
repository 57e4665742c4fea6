# Transports that need something of the machine. Each has a switch UNISONO_<NAME>, and a function unisono_check_<name>(out) that says why it
# cannot be had (nothing when it can): AUTO leaves it out then and says why, ON ends the configuration, OFF does not ask.
#
# unisono_choose(name out): `out` is true where the transport is to be built.
function(unisono_choose name out)
  string(TOUPPER ${name} switch)
  set(switch UNISONO_${switch})
  set(${switch} AUTO CACHE STRING "Build the transport ${name}: AUTO, ON (it must work) or OFF")
  set_property(CACHE ${switch} PROPERTY STRINGS AUTO ON OFF)
  set(problem "${switch} is OFF")
  if(NOT ${switch} STREQUAL "OFF")
    set(problem "")
    cmake_language(CALL unisono_check_${name} problem)
    if(problem AND ${switch} STREQUAL "ON")
      message(FATAL_ERROR "${switch}=ON: ${problem}")
    endif()
  endif()
  if(problem)
    message(STATUS "the transport ${name} is left out of C++: ${problem}")
    set(${out} FALSE PARENT_SCOPE)
  else()
    set(${out} TRUE PARENT_SCOPE)
  endif()
endfunction()
