// Compiles HOP_CODE for AVX-VNNI (level.h), for kernels that gain from it; others run the code for AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include "common/level.h"

#define HOP_IN_AVX_VNNI
#define HOP_HEADER(path) HOP_NAME_OF(path##_avx_vnni.h)
#define HOP_WIDE_OR_PLAIN(path) HOP_NAME_OF(path##_plain.h)
HOP_BEGIN_TARGET(HOP_TARGET_AVX_VNNI)
namespace hop {
namespace avx_vnni {
#include HOP_CODE
}  // namespace avx_vnni
}  // namespace hop
HOP_END_TARGET
#undef HOP_IN_AVX_VNNI
#undef HOP_HEADER
#undef HOP_WIDE_OR_PLAIN
#endif
