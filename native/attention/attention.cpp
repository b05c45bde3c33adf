#include "attention/attention.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/cpu.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "functions/functions.h"
#include "functions/polynomials.h"
#include "quantize/quantize.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of what the intrinsics leave undefined on purpose
#endif

#include "common/scratch.h"
#define HOP_CODE "attention/code.h"
#include "common/levels.h"

int hop_attend(const hop_attention* attention, const int8_t* q, const float* q_scale, const int8_t* k, const float* k_scale,
               const int8_t* v, const float* v_scale, const void* mask, void* result, int32_t threads) {
    const hop::AttentionCall call{*attention, q, k, v, q_scale, k_scale, v_scale, mask, result, threads};
    return HOP_BY_LEVEL(attend(call));
}
