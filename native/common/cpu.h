// Which instructions this CPU has, and which of them kernels may use.
#pragma once

namespace hop {

// What a CPU has; each has all that those before it have. HOP_AVX512_VNNI counts VBMI in.
enum Cpu { HOP_PORTABLE = 0, HOP_AVX2, HOP_AVX512_PLAIN, HOP_AVX512_VNNI, HOP_AVX512_BF16, HOP_AMX_TILES };

// Which code kernels run. That for AVX-512 needs VNNI and VBMI; avx512_bf16 differs from it in products of floats alone.
enum class Level : int { portable = 0, avx2, avx512, avx512_bf16, amx };

Cpu best_cpu();  // that the CPU and the operating system offer
Level level();   // for the best, or what was asked for

}  // namespace hop
