// Instruction sets: which ones this CPU has, and which ones kernels may use.
#pragma once

// Whether the code for AVX-512 and AMX is part of this build (build.cmake).
#if defined(__x86_64__) && !defined(HOP_WITHOUT_AVX512)
#define HOP_HAS_AVX512 1
#else
#define HOP_HAS_AVX512 0
#endif

namespace hop {

// The CPU's capabilities. Each includes all previous ones, except that CPUs with AVX-512 may lack AVX-VNNI; each
// architecture counts from 1.
#if defined(__AARCH64EL__)
enum Cpu { HOP_PORTABLE = 0, HOP_NEON, HOP_NEON_DOTPROD, HOP_NEON_I8MM, HOP_NEON_BF16 };
#else
// HOP_AVX512_VNNI includes VBMI.
enum Cpu { HOP_PORTABLE = 0, HOP_AVX2, HOP_AVX_VNNI, HOP_AVX512_PLAIN, HOP_AVX512_VNNI, HOP_AVX512_BF16, HOP_AMX_TILES };
#endif

// The code that kernels run. avx_vnni and avx512_plain (AVX-512 without VNNI or VBMI) differ from avx2 only in products and
// convolutions, avx_vnni also in attention. avx512 needs VNNI and VBMI; avx512_bf16 differs from it only in float products.
enum class Level : int { portable = 0, avx2, avx_vnni, avx512_plain, avx512, avx512_bf16, amx, neon, neon_dotprod, neon_i8mm, neon_bf16 };

Cpu best_cpu();  // the best that the CPU, the operating system and this build support
Level level();   // the level for the best CPU, or the one set by hop_use_level
bool reorders_few_rows();  // whether few rows of floats may be summed in another order (hop.h)

}  // namespace hop

// Declares functions that are defined at each level (level.h), and calls the one for this CPU:
//
//     HOP_AT_EACH_LEVEL(int run(const Call& call);)      portable, avx2 and avx512; with _OR_NEON also neon
//     HOP_BY_LEVEL(run(call))
#if defined(__x86_64__)
#define HOP_AT_EACH_LEVEL(...)            \
    namespace portable { __VA_ARGS__ }    \
    namespace avx2 { __VA_ARGS__ }        \
    namespace avx512 { __VA_ARGS__ }
#define HOP_BY_NARROW_LEVEL(...) (hop::level() >= hop::Level::avx2 ? hop::avx2::__VA_ARGS__ : hop::portable::__VA_ARGS__)
#if HOP_HAS_AVX512
#define HOP_BY_LEVEL(...) \
    (hop::level() >= hop::Level::avx512 ? hop::avx512::__VA_ARGS__ : HOP_BY_NARROW_LEVEL(__VA_ARGS__))
#else
#define HOP_BY_LEVEL(...) HOP_BY_NARROW_LEVEL(__VA_ARGS__)
#endif
#else
#define HOP_AT_EACH_LEVEL(...) namespace portable { __VA_ARGS__ }
#define HOP_BY_LEVEL(...) hop::portable::__VA_ARGS__
#endif
#if defined(__AARCH64EL__)
#define HOP_AT_EACH_LEVEL_OR_NEON(...) \
    HOP_AT_EACH_LEVEL(__VA_ARGS__)     \
    namespace neon { __VA_ARGS__ }
#define HOP_BY_LEVEL_OR_NEON(...) \
    (hop::level() == hop::Level::portable ? hop::portable::__VA_ARGS__ : hop::neon::__VA_ARGS__)
#else
#define HOP_AT_EACH_LEVEL_OR_NEON(...) HOP_AT_EACH_LEVEL(__VA_ARGS__)
#define HOP_BY_LEVEL_OR_NEON(...) HOP_BY_LEVEL(__VA_ARGS__)
#endif
