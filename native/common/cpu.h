// Which instructions this CPU has, and which of them kernels may use.
#pragma once

namespace hop {

// What a CPU has; each has all that those before it have, and each architecture counts its own from 1 on.
#if defined(__AARCH64EL__)
enum Cpu { HOP_PORTABLE = 0, HOP_NEON, HOP_NEON_DOTPROD, HOP_NEON_I8MM, HOP_NEON_BF16 };
#else
// HOP_AVX512_VNNI counts VBMI in.
enum Cpu { HOP_PORTABLE = 0, HOP_AVX2, HOP_AVX512_PLAIN, HOP_AVX512_VNNI, HOP_AVX512_BF16, HOP_AMX_TILES };
#endif

// Which code kernels run. That for AVX-512 needs VNNI and VBMI; avx512_bf16 differs from it in products of floats alone.
enum class Level : int { portable = 0, avx2, avx512, avx512_bf16, amx, neon, neon_dotprod, neon_i8mm, neon_bf16 };

Cpu best_cpu();  // that the CPU and the operating system offer
Level level();   // for the best, or what was asked for
bool reorders_few_rows();  // whether few rows of floats may take an order of their own (hop.h)

}  // namespace hop

// Declares what code defines at each level that it is compiled for (level.h), and calls that of this CPU's level:
//
//     HOP_AT_EACH_LEVEL(int run(const Call& call);)      portable, avx2 and avx512; with _OR_NEON also neon
//     HOP_BY_LEVEL(run(call))
#if defined(__x86_64__)
#define HOP_AT_EACH_LEVEL(...)            \
    namespace portable { __VA_ARGS__ }    \
    namespace avx2 { __VA_ARGS__ }        \
    namespace avx512 { __VA_ARGS__ }
#define HOP_BY_LEVEL(...)                                         \
    (hop::level() >= hop::Level::avx512 ? hop::avx512::__VA_ARGS__ \
     : hop::level() == hop::Level::avx2 ? hop::avx2::__VA_ARGS__   \
                                        : hop::portable::__VA_ARGS__)
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
