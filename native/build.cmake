# Builds the native kernels in a folder of build/, and copies the library to hop/, or, if the build fails, writes _native.txt
# with the output of CMake and the compiler. An installation (CMakeLists.txt) continues in either case; hop/ is then the
# installed folder. Without an installation it is that of this checkout:
#     cmake -P native/build.cmake
cmake_minimum_required(VERSION 3.24)
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH root)
set(build ${root}/build/native)
set(place ${root}/hop)
if(HOP_STATE STREQUAL editable)
    # This file is enough for Python to find the package here, unless another copy precedes it on the path.
    file(WRITE ${CMAKE_INSTALL_PREFIX}/torch_hop.pth "${root}\n")
elseif(HOP_STATE)
    set(place ${CMAKE_INSTALL_PREFIX}/hop)
endif()

# A checkout is built for this machine: if the CPU lacks AVX-512, leaving out the code for it halves the time. Wheels and
# plain installs may run elsewhere, so they contain everything.
if("$ENV{HOP_AVX512}" STREQUAL "")
    set(ENV{HOP_AVX512} ON)
    if((HOP_STATE STREQUAL editable OR NOT HOP_STATE) AND EXISTS /proc/cpuinfo)
        file(STRINGS /proc/cpuinfo flags REGEX "^flags" LIMIT_COUNT 1) # of x86
        if(flags AND NOT flags MATCHES avx512f)
            set(ENV{HOP_AVX512} OFF)
        endif()
    endif()
endif()
if(NOT $ENV{HOP_AVX512})
    set(build ${build}-without-avx512) # so that neither build undoes the other
endif()

# All settings come from the environment, which CMake only reads in an empty folder, so changed settings need a fresh
# build.
if(NOT CMAKE_GENERATOR)
    set(CMAKE_GENERATOR Ninja)
    find_program(CMAKE_MAKE_PROGRAM ninja REQUIRED)
endif()
set(ENV{NINJA_STATUS} "native kernels, %f of %t: ")
set(settings "")
foreach(name IN ITEMS CMAKE_GENERATOR CMAKE_TOOLCHAIN_FILE CMAKE_OSX_ARCHITECTURES CMAKE_BUILD_TYPE CXX CXXFLAGS LDFLAGS
        MACOSX_DEPLOYMENT_TARGET HOP_AVX512)
    if(${name})
        set(ENV{${name}} "${${name}}")
    endif()
    string(APPEND settings "${name}=$ENV{${name}}\n")
endforeach()
set(known "")
if(EXISTS ${build}/settings.txt)
    file(READ ${build}/settings.txt known)
endif()
if(known STREQUAL settings)
    set(fresh "")
else()
    set(fresh --fresh)
    file(WRITE ${build}/settings.txt "${settings}")
endif()

# Runs a command, shows its output, and keeps it in `said`.
function(run)
    execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output
        ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE)
    set(failed ${status} PARENT_SCOPE)
    set(said "${output}" PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} -S ${root} -B ${build} --log-level=NOTICE -DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}
    -DHOP_AVX512=$ENV{HOP_AVX512} ${fresh})
if(failed)
    file(REMOVE ${build}/settings.txt)
else()
    run(${CMAKE_COMMAND} --build ${build})
endif()

file(GLOB earlier ${place}/_native*.so ${place}/_native.txt)
file(REMOVE ${earlier})
if(failed)
    file(WRITE ${place}/_native.txt "${said}")
    message(STATUS "hop: the native kernels were NOT built; hop goes on without them: ${place}/_native.txt says why")
else()
    file(COPY ${build}/_native.abi3.so DESTINATION ${place})
    message(STATUS "hop: the native kernels were built: ${place}/_native.abi3.so")
endif()
