// Which instructions this CPU has, and which of them kernels may use.
#pragma once

namespace hop {

// Each level has all that those below it have.
enum class Level : int { portable = 0, avx2 = 1, avx512 = 2, amx = 3 };

Level best_level();  // that the CPU and the operating system offer
Level level();       // in use: the best, or what was asked for

}  // namespace hop
