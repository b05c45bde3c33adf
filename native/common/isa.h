// Code for one instruction set. A file first includes all system headers that it needs, then opens a region with
// HOP_BEGIN_TARGET and a namespace, and includes the shared code in it (level.h). So the linker cannot merge a function
// compiled for one CPU with another's.
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

// GCC restricts plain loops to 256 bits by default; clang has no such option for functions.
#if defined(__clang__)
#define HOP_WIDE ""
#else
#define HOP_WIDE ",prefer-vector-width=512"
#endif

#define HOP_TARGET_AVX2 "avx2,fma,f16c"
#define HOP_TARGET_AVX_VNNI HOP_TARGET_AVX2 ",avxvnni"
#define HOP_TARGET_AVX512_PLAIN HOP_TARGET_AVX2 ",avx512f,avx512bw,avx512dq,avx512vl"
#define HOP_TARGET_AVX512 "bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni" HOP_WIDE
#define HOP_TARGET_AVX512_BF16 HOP_TARGET_AVX512 ",avx512bf16"
#define HOP_TARGET_AMX HOP_TARGET_AVX512_BF16 ",amx-tile,amx-int8,amx-bf16"

// AArch64: extensions of NEON, which all of these CPUs have. Older compilers declare these instructions only if the
// whole file is compiled for them; they get no level above `neon`.
#if defined(__clang__)
#define HOP_BEGIN_NEON
#define HOP_END_NEON
#define HOP_TARGET_DOTPROD "dotprod"
#define HOP_TARGET_I8MM "dotprod,i8mm"
#define HOP_TARGET_BF16 "dotprod,i8mm,bf16"
#else
// Otherwise GCC schedules loads before register allocation, and they take the registers of sums.
#define HOP_BEGIN_NEON _Pragma("GCC push_options") _Pragma("GCC optimize(\"no-schedule-insns\")")
#define HOP_END_NEON _Pragma("GCC pop_options")
#define HOP_TARGET_DOTPROD "arch=armv8.2-a+dotprod"
#define HOP_TARGET_I8MM "arch=armv8.2-a+dotprod+i8mm"
#define HOP_TARGET_BF16 "arch=armv8.2-a+dotprod+i8mm+bf16"
#endif
#if defined(__apple_build_version__)
#define HOP_NEON_TARGETS (__clang_major__ >= 15)
#elif defined(__clang__)
#define HOP_NEON_TARGETS (__clang_major__ >= 16)
#else
#define HOP_NEON_TARGETS (__GNUC__ >= 10)
#endif

// For functions and lambdas whose arguments must stay in registers.
#define HOP_INLINED __attribute__((always_inline))
#define HOP_INLINE static inline HOP_INLINED
#define HOP_MEMBER inline HOP_INLINED

// For functions that must not be inlined.
#define HOP_ALONE __attribute__((noinline))

// For rarely called functions where small code is better than fast code: loops are not vectorized.
#define HOP_SELDOM __attribute__((noinline, cold))

// In a loop over 16 elements at a time: makes GCC vectorize one iteration of 16 elements rather than several iterations
// together, which takes ten times the code.
#define HOP_ONE_TURN asm volatile("")

// Before a short loop over arrays that must stay in registers.
#if defined(__clang__)
#define HOP_UNROLL _Pragma("clang loop unroll(full)")
#define HOP_UNROLL_BY_TWO _Pragma("clang loop unroll_count(2)")
#else
#define HOP_UNROLL _Pragma("GCC unroll 16")
#define HOP_UNROLL_BY_TWO _Pragma("GCC unroll 2")
#endif
