// Compiles HOP_CODE for AVX2 (level.h).
#if defined(__x86_64__)
#include <immintrin.h>

#include "common/level.h"

#define HOP_IN_AVX2
#define HOP_HEADER(path) HOP_NAME_OF(path##_avx2.h)
#define HOP_WIDE_OR_PLAIN(path) HOP_NAME_OF(path##_plain.h)
HOP_BEGIN_TARGET(HOP_TARGET_AVX2)
namespace hop {
namespace avx2 {
#include HOP_CODE
}  // namespace avx2
}  // namespace hop
HOP_END_TARGET
#undef HOP_IN_AVX2
#undef HOP_HEADER
#undef HOP_WIDE_OR_PLAIN
#endif
