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

namespace hop {
namespace {

// Memory of this thread, valid until its next call.
char* scratch(size_t bytes) {
    static thread_local Scratch own;
    own.trim();
    return own.get(bytes);
}

}  // namespace

namespace portable {
namespace {
#include "quantize/numbers.h"
#include "quantize/stats.h"
#include "quantize/scales.h"
#include "quantize/encode.h"
#include "quantize/plain.h"
#include "quantize/measure.h"
#include "quantize/strip.h"
#include "quantize/run.h"
#include "quantize/dequantize_decode.h"
#include "quantize/dequantize_plain.h"
#include "quantize/dequantize_run.h"
#include "quantize/noise_plain.h"
#include "update/run.h"
#include "update/plain.h"
#include "update/all.h"
}  // namespace
}  // namespace portable

#if defined(__x86_64__)
HOP_BEGIN_TARGET(HOP_AVX2)
namespace avx2 {
namespace {
#include "quantize/numbers.h"
#include "quantize/stats.h"
#include "quantize/scales.h"
#include "quantize/encode.h"
#include "quantize/plain.h"
#include "quantize/measure.h"
#include "quantize/strip.h"
#include "quantize/run.h"
#include "quantize/dequantize_decode.h"
#include "quantize/dequantize_plain.h"
#include "quantize/dequantize_run.h"
#include "quantize/noise_plain.h"
#include "update/run.h"
#include "update/plain.h"
#include "update/all.h"
}  // namespace
}  // namespace avx2
HOP_END_TARGET

HOP_BEGIN_TARGET(HOP_AVX512)
namespace avx512 {
namespace {
#include "quantize/numbers.h"
#include "quantize/stats.h"
#include "quantize/scales.h"
#include "quantize/encode.h"
#include "common/bytes_avx512.h"
#include "quantize/avx512.h"
#include "quantize/codes_avx512.h"
#include "quantize/words_avx512.h"
#include "quantize/book_avx512.h"
#include "quantize/choose_avx512.h"
#include "quantize/codes_with_noise_avx512.h"
#include "quantize/stats_avx512.h"
#include "quantize/measure.h"
#include "quantize/strip.h"
#include "quantize/run.h"
#include "quantize/dequantize_decode.h"
#include "quantize/dequantize_avx512.h"
#include "quantize/dequantize_run.h"
#include "quantize/noise_avx512.h"
#include "update/run.h"
#include "update/adam_avx512.h"
#include "update/all.h"
}  // namespace
}  // namespace avx512
HOP_END_TARGET
#elif defined(__AARCH64EL__)
namespace neon {
namespace {
#include "quantize/numbers.h"
#include "quantize/stats.h"
#include "quantize/scales.h"
#include "quantize/encode.h"
#include "quantize/plain.h"
#include "quantize/measure.h"
#include "quantize/strip.h"
#include "quantize/run.h"
#include "quantize/dequantize_decode.h"
#include "common/bytes_neon.h"
#include "quantize/dequantize_neon.h"
#include "quantize/dequantize_run.h"
#include "quantize/noise_plain.h"
#include "update/run.h"
#include "update/plain.h"
#include "update/all.h"
}  // namespace
}  // namespace neon
#endif
}  // namespace hop

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
