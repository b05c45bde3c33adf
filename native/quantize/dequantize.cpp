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

namespace hop {
namespace portable {
namespace {
#include "quantize/numbers.h"
#include "quantize/dequantize_decode.h"
#include "quantize/dequantize_plain.h"
#include "quantize/dequantize_run.h"
}  // namespace
}  // namespace portable

#if defined(__x86_64__)
HOP_BEGIN_TARGET(HOP_AVX2)
namespace avx2 {
namespace {
#include "quantize/numbers.h"
#include "quantize/dequantize_decode.h"
#include "quantize/dequantize_plain.h"
#include "quantize/dequantize_run.h"
}  // namespace
}  // namespace avx2
HOP_END_TARGET

HOP_BEGIN_TARGET(HOP_AVX512)
namespace avx512 {
namespace {
#include "quantize/numbers.h"
#include "quantize/dequantize_decode.h"
#include "common/bytes_avx512.h"
#include "quantize/dequantize_avx512.h"
#include "quantize/dequantize_run.h"
}  // namespace
}  // namespace avx512
HOP_END_TARGET
#elif defined(__AARCH64EL__)
namespace neon {
namespace {
#include "quantize/numbers.h"
#include "quantize/dequantize_decode.h"
#include "common/bytes_neon.h"
#include "quantize/dequantize_neon.h"
#include "quantize/dequantize_run.h"
}  // namespace
}  // namespace neon
#endif
}  // namespace hop

int hop_dequantize(const hop_quantizer* q, const hop_blocks* blocks, int32_t dtype, const uint8_t* codes,
                   const void* scale, const void* second, void* out, int32_t threads) {
    const hop::DequantizeCall call{*q, *blocks, codes, scale, second, out, threads};
    return HOP_BY_LEVEL_OR_NEON(dequantize(call, dtype));
}
