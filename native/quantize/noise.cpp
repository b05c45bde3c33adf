// Random bits of stochastic rounding: Philox4x32-10, as hop/tensor/buffers/noise.py defines it.
#include <algorithm>
#include <cstring>

#include "common/cpu.h"
#include "hop.h"
#include "common/isa.h"
#include "common/parallel.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hop {
namespace portable {
namespace {
#include "quantize/noise_plain.h"
#include "quantize/noise_run.h"
}  // namespace
}  // namespace portable

#if defined(__x86_64__)
HOP_BEGIN_TARGET(HOP_AVX2)
namespace avx2 {
namespace {
#include "quantize/noise_plain.h"
#include "quantize/noise_run.h"
}  // namespace
}  // namespace avx2
HOP_END_TARGET

HOP_BEGIN_TARGET(HOP_AVX512)
namespace avx512 {
namespace {
#include "quantize/noise_avx512.h"
#include "quantize/noise_run.h"
}  // namespace
}  // namespace avx512
HOP_END_TARGET
#endif
}  // namespace hop

void hop_noise(const int64_t* seed, uint32_t stream, int64_t count, uint8_t* out, int32_t threads) {
    const uint64_t key = static_cast<uint64_t>(*seed);
    return HOP_BY_LEVEL(noise(key, stream, count, out, threads));
}
