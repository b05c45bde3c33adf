// Compiles HOP_CODE for NEON (level.h).
#if defined(__AARCH64EL__)
#include <arm_neon.h>

#include "common/level.h"

#define HOP_IN_NEON
#define HOP_HEADER(path) HOP_NAME_OF(path##_neon.h)
#define HOP_WIDE_OR_PLAIN(path) HOP_NAME_OF(path##_plain.h)
namespace hop {
namespace neon {
#include HOP_CODE
}  // namespace neon
}  // namespace hop
#undef HOP_IN_NEON
#undef HOP_HEADER
#undef HOP_WIDE_OR_PLAIN
#endif
