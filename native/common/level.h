// System headers and common/ headers that a kernel needs at each level.
//
// A kernel's code is compiled once per instruction level, in that level's namespace: hop::portable, hop::avx2,
// hop::avx512 and, for some kernels, hop::neon. A short file names the code and includes the header of a level:
//
//     #include "groups/groups.h"
//     #define HOP_CODE "groups/integers_code.h"
//     #include "common/level_avx2.h"
//
// Small kernels have one file for all levels, which includes common/levels.h. On other architectures the x86 headers
// are empty. HOP_CODE keeps everything except its entry points in an unnamed namespace, because kernels share headers.
// It can test HOP_IN_PORTABLE, HOP_IN_AVX2, HOP_IN_AVX_VNNI, HOP_IN_AVX512 and HOP_IN_NEON, and use
//
//     HOP_HEADER(rows/sums)              "rows/sums_plain.h", "rows/sums_avx2.h", "rows/sums_avx512.h", "rows/sums_neon.h"
//     HOP_WIDE_OR_PLAIN(rows/hadamard)   "rows/hadamard_avx512.h"; at other levels "rows/hadamard_plain.h"
#pragma once
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // intrinsics leave values undefined on purpose
#pragma GCC diagnostic ignored "-Wunused-function"      // headers are shared by several kernels
#endif

#include "common/cpu.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "common/scratch.h"

#define HOP_NAME_OF(path) #path
