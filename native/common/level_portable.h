// Compiles HOP_CODE as plain C++ (level.h).
#include "common/level.h"

#define HOP_IN_PORTABLE
#define HOP_HEADER(path) HOP_NAME_OF(path##_plain.h)
#define HOP_WIDE_OR_PLAIN(path) HOP_NAME_OF(path##_plain.h)
namespace hop {
namespace portable {
#include HOP_CODE
}  // namespace portable
}  // namespace hop
#undef HOP_IN_PORTABLE
#undef HOP_HEADER
#undef HOP_WIDE_OR_PLAIN
