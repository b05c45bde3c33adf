// Code for one set of instructions. A file includes all that it needs from the system, then opens a region with
// HOP_BEGIN_TARGET and a namespace of its own, and includes the shared code there: so no function that was compiled for
// one CPU can be merged with another's.
#pragma once

#define HOP_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define HOP_BEGIN_TARGET(features) \
    HOP_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define HOP_END_TARGET _Pragma("clang attribute pop")
#else
#define HOP_BEGIN_TARGET(features) _Pragma("GCC push_options") HOP_PRAGMA(GCC target(features))
#define HOP_END_TARGET _Pragma("GCC pop_options")
#endif

// GCC keeps plain loops to 256 bits unless told; clang knows no such option of a function.
#if defined(__clang__)
#define HOP_WIDE ""
#else
#define HOP_WIDE ",prefer-vector-width=512"
#endif

#define HOP_AVX2 "avx2,fma,f16c"
#define HOP_AVX512 "bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni" HOP_WIDE
#define HOP_AVX512_BF16 HOP_AVX512 ",avx512bf16"
#define HOP_AMX HOP_AVX512_BF16 ",amx-tile,amx-int8,amx-bf16"

// Before a loop of few steps whose arrays are to lie in registers.
#if defined(__clang__)
#define HOP_UNROLL _Pragma("clang loop unroll(full)")
#define HOP_UNROLL_BY_TWO _Pragma("clang loop unroll_count(2)")
#else
#define HOP_UNROLL _Pragma("GCC unroll 16")
#define HOP_UNROLL_BY_TWO _Pragma("GCC unroll 2")
#endif
