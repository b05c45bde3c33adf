#include "quantize/quantize.h"

int hop_dequantize(const hop_quantizer* q, const hop_blocks* blocks, int32_t dtype, const uint8_t* codes,
                   const void* scale, const void* second, void* out, int32_t threads) {
    const hop::DequantizeCall call{*q, *blocks, codes, scale, second, out, threads};
    return HOP_BY_LEVEL_OR_NEON(dequantize(call, dtype));
}
