// Compiles HOP_CODE for AVX-512 (level.h).
#include "common/cpu.h"

#if HOP_HAS_AVX512
#include <immintrin.h>

#include "common/level.h"

#define HOP_IN_AVX512
#define HOP_HEADER(path) HOP_NAME_OF(path##_avx512.h)
#define HOP_WIDE_OR_PLAIN(path) HOP_NAME_OF(path##_avx512.h)
HOP_BEGIN_TARGET(HOP_TARGET_AVX512)
namespace hop {
namespace avx512 {
#include HOP_CODE
}  // namespace avx512
}  // namespace hop
HOP_END_TARGET
#undef HOP_IN_AVX512
#undef HOP_HEADER
#undef HOP_WIDE_OR_PLAIN
#endif
