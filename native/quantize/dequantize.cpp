#include <atomic>

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
#endif

#define HOP_CODE "quantize/dequantize_code.h"
#define HOP_CODE_FOR_NEON
#include "common/levels.h"

int hop_dequantize(const hop_quantizer* q, const hop_blocks* blocks, int32_t dtype, const uint8_t* codes,
                   const void* scale, const void* second, void* out, int32_t threads) {
    const hop::DequantizeCall call{*q, *blocks, codes, scale, second, out, threads};
    return HOP_BY_LEVEL_OR_NEON(dequantize(call, dtype));
}
