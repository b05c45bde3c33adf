// Dequantization (quantize.h) at one level.
namespace {
#include "quantize/numbers.h"
#if defined(HOP_IN_AVX512)
#include "common/bytes_avx512.h"
#endif
#include "quantize/decoding.h"
}  // namespace

int dequantize(const DequantizeCall& c, int32_t dtype) {
    switch (dtype) {
        case HOP_F32: return dequantize_tensor<F32>(c);
        case HOP_BF16: return dequantize_tensor<BF16>(c);
        case HOP_F16: return dequantize_tensor<F16>(c);
        default: return HOP_UNSUPPORTED;
    }
}

void decode_f32(const DequantizeCall& c, const Strip& s, const Unit& u) { decode_unit<F32>(c, s, u); }
