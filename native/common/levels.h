// Includes HOP_CODE, the file that has a kernel's code, once for each level that there is code for, in a namespace of its
// own: hop::portable, hop::avx2, hop::avx512, and with HOP_CODE_FOR_NEON hop::neon. Who includes this has included all that
// the code needs from the system. In the code HOP_IN_PORTABLE, HOP_IN_AVX2, HOP_IN_AVX512 or HOP_IN_NEON is defined, and
//
//     HOP_HEADER(rows/gelu)              "rows/gelu_plain.h", "rows/gelu_avx2.h", "rows/gelu_avx512.h", "rows/gelu_neon.h"
//     HOP_WIDE_OR_PLAIN(rows/gelu)       "rows/gelu_avx512.h", and of the other levels "rows/gelu_plain.h"
#define HOP_NAME_OF(path) #path

namespace hop {
#define HOP_IN_PORTABLE
#define HOP_HEADER(path) HOP_NAME_OF(path##_plain.h)
#define HOP_WIDE_OR_PLAIN(path) HOP_NAME_OF(path##_plain.h)
namespace portable {
namespace {
#include HOP_CODE
}  // namespace
}  // namespace portable
#undef HOP_IN_PORTABLE
#undef HOP_HEADER

#if defined(__x86_64__)
#define HOP_IN_AVX2
#define HOP_HEADER(path) HOP_NAME_OF(path##_avx2.h)
HOP_BEGIN_TARGET(HOP_AVX2)
namespace avx2 {
namespace {
#include HOP_CODE
}  // namespace
}  // namespace avx2
HOP_END_TARGET
#undef HOP_IN_AVX2
#undef HOP_HEADER
#undef HOP_WIDE_OR_PLAIN

#define HOP_IN_AVX512
#define HOP_HEADER(path) HOP_NAME_OF(path##_avx512.h)
#define HOP_WIDE_OR_PLAIN(path) HOP_NAME_OF(path##_avx512.h)
HOP_BEGIN_TARGET(HOP_AVX512)
namespace avx512 {
namespace {
#include HOP_CODE
}  // namespace
}  // namespace avx512
HOP_END_TARGET
#undef HOP_IN_AVX512
#undef HOP_HEADER
#elif defined(__AARCH64EL__) && defined(HOP_CODE_FOR_NEON)
#define HOP_IN_NEON
#define HOP_HEADER(path) HOP_NAME_OF(path##_neon.h)
namespace neon {
namespace {
#include HOP_CODE
}  // namespace
}  // namespace neon
#undef HOP_IN_NEON
#undef HOP_HEADER
#endif
#undef HOP_WIDE_OR_PLAIN
#undef HOP_NAME_OF
#undef HOP_CODE
}  // namespace hop
