// Random bits for stochastic rounding: Philox4x32-10, as defined in hop/tensor/buffers/noise.py.
#include <algorithm>

#include "hop.h"

#define HOP_CODE "quantize/noise_code.h"
#include "common/levels.h"

void hop_noise(const int64_t* seed, uint32_t stream, int64_t count, int32_t bits, void* out, int32_t threads) {
    const uint64_t key = static_cast<uint64_t>(*seed);
    return HOP_BY_LEVEL(noise(key, stream, count, bits, out, threads));
}
