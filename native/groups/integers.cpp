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

#define HOP_CODE "groups/integers_code.h"
#include "common/levels.h"

namespace hop {

int multiply_integers(const GroupCall& call) {
    return HOP_BY_LEVEL(run(call));
}

}  // namespace hop
