// A step of an optimizer on quantized states, as hop/optim/updates.py defines it.
#include <atomic>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common/cpu.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "quantize/quantize.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__AARCH64EL__)
#include <arm_neon.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of what the intrinsics leave undefined on purpose
#pragma GCC diagnostic ignored "-Wunused-function"      // of the headers, which quantize more than states
#endif

#include "common/scratch.h"
#define HOP_CODE "update/code.h"
#define HOP_CODE_FOR_NEON
#include "common/levels.h"

int hop_step(const hop_update* u, int32_t threads) {
    for (int32_t i = 0; i < u->states; ++i) {
        const hop_state& s = u->state[i];
        if (!s.quantizer) continue;
        const bool one_scale = s.quantizer->rule == HOP_AMAX || s.quantizer->rule == HOP_CURRENT_SCALING;
        if (!one_scale || s.block < HOP_LEAST_BLOCK || s.block > HOP_MOST_BLOCK || HOP_MOST_BLOCK % s.block != 0)
            return HOP_UNSUPPORTED;
    }
    return HOP_BY_LEVEL_OR_NEON(update(*u, threads));
}
