#include "groups/groups.h"

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/cpu.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "quantize/quantize.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of what the intrinsics leave undefined on purpose
#endif

namespace hop {
namespace portable {
namespace {
#include "common/rounding.h"
#include "groups/lanes_plain.h"
#include "groups/order.h"
#include "groups/integers_plain.h"
#include "groups/weight.h"
#include "groups/codes_of_rows.h"
#include "groups/integers.h"
}  // namespace
}  // namespace portable

#if defined(__x86_64__)
HOP_BEGIN_TARGET(HOP_AVX2)
namespace avx2 {
namespace {
#include "common/rounding.h"
#include "groups/lanes_avx2.h"
#include "groups/order.h"
#include "groups/integers_avx2.h"
#include "groups/weight.h"
#include "groups/codes_of_rows.h"
#include "groups/integers.h"
}  // namespace
}  // namespace avx2
HOP_END_TARGET

HOP_BEGIN_TARGET(HOP_AVX512)
namespace avx512 {
namespace {
#include "common/rounding.h"
#include "groups/lanes_avx512.h"
#include "groups/order.h"
#include "groups/integers_avx512.h"
#include "groups/weight.h"
#include "groups/codes_of_rows.h"
#include "groups/integers.h"
}  // namespace
}  // namespace avx512
HOP_END_TARGET
#endif

int multiply_integers(const GroupCall& call) {
    return HOP_BY_LEVEL(run(call));
}

}  // namespace hop
