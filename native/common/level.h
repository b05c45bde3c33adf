// What the code of a kernel needs at each level, from the system and from common/.
//
// A kernel's code is compiled once for each level of instructions, in a namespace of that level: hop::portable, hop::avx2,
// hop::avx512 and, of some kernels, hop::neon. A file of a few lines names the code and includes the header of a level:
//
//     #include "groups/groups.h"
//     #define HOP_CODE "groups/integers_code.h"
//     #include "common/level_avx2.h"
//
// Small kernels have one file for all levels, which includes common/levels.h. For other architectures a header of x86
// is empty. HOP_CODE keeps all but its entries in an unnamed namespace, as headers are shared; it finds defined
// HOP_IN_PORTABLE, HOP_IN_AVX2, HOP_IN_AVX_VNNI, HOP_IN_AVX512 or HOP_IN_NEON, and
//
//     HOP_HEADER(rows/sums)              "rows/sums_plain.h", "rows/sums_avx2.h", "rows/sums_avx512.h", "rows/sums_neon.h"
//     HOP_WIDE_OR_PLAIN(rows/hadamard)   "rows/hadamard_avx512.h", and of the other levels "rows/gelu_plain.h"
#pragma once
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of what the intrinsics leave undefined on purpose
#pragma GCC diagnostic ignored "-Wunused-function"      // of headers, which several kernels share
#endif

#include "common/cpu.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "common/scratch.h"

#define HOP_NAME_OF(path) #path
