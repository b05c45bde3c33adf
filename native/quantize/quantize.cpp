#include "quantize/quantize.h"

#include <cmath>
#include <cstring>

int hop_codebook_index(const float* thresholds, int32_t size, uint8_t* index) {
    const auto code = [&](uint32_t bits) {
        float y;
        std::memcpy(&y, &bits, 4);
        int32_t found = 0;
        for (int32_t i = 1; i < size; ++i) found += y >= thresholds[i];
        return found;
    };
    for (uint32_t high = 0; high < HOP_INDEX_SIZE; ++high) {
        if ((high & 0x7fff) > 0x7f80) {  // NaN
            index[high] = 0;
            continue;
        }
        const bool infinite = (high & 0x7fff) == 0x7f80;
        const int32_t a = code(high << 16), b = code(high << 16 | (infinite ? 0 : 0xffff));
        const int32_t lower = a < b ? a : b, upper = a < b ? b : a;
        if (upper - lower > 1) return HOP_UNSUPPORTED;
        index[high] = static_cast<uint8_t>(lower);
    }
    return HOP_OK;
}

// Products may find codes if the index never leaves two thresholds to compare with, and no threshold is so small that
// quotients lose digits.
void hop_codebook_tables(const float* thresholds, const float* numbers, int32_t size, uint8_t* tables) {
    const auto bits = [](float x) {
        uint32_t b;
        std::memcpy(&b, &x, 4);
        return b;
    };
    for (int32_t i = 0; i < 256; ++i)
        for (int32_t byte = 0; byte < 4; ++byte) {
            tables[256 * byte + i] = static_cast<uint8_t>(bits(numbers[i]) >> (8 * byte));
            tables[1024 + 256 * byte + i] = static_cast<uint8_t>(bits(thresholds[i + 1]) >> (8 * byte));
        }
    bool even = true;
    for (int32_t i = 1; i < size; ++i) {
        const float t = thresholds[i], lowered = t * (t < 0 ? 1 + 2 * hop::kLower : 1 - 2 * hop::kLower);
        const bool both = bits(lowered) >> 16 == bits(thresholds[i - 1]) >> 16;
        even = even && !(both && size > 16) && std::fabs(t) >= 0x1p-98f;
    }
    tables[2048] = even;
    hop::find_pieces(thresholds, numbers, size, tables);
    hop::find_bins(thresholds, size, tables);
}

int hop_quantize(const hop_quantizer* q, const hop_blocks* blocks, int32_t dtype, const void* x,
                 const void* given_scale, int32_t given_codes, const uint8_t* given_zero_point, const void* noise,
                 int32_t noise_bits, uint8_t* codes, void* scale, void* second, int32_t threads) {
    const hop::QuantizeCall call{*q,    *blocks,    x,     given_scale, given_codes != 0, given_zero_point,
                                 noise, noise_bits, codes, scale,       second,           threads, false};
    return HOP_BY_LEVEL(quantize(call, dtype));
}

int hop_quantize_product(const hop_quantizer* q, const hop_blocks* blocks, int32_t dtype, const void* x, int32_t turned,
                         const float* factor, const int64_t* seed, uint32_t stream, const void* noise,
                         int32_t noise_bits, uint8_t* codes, void* scale, void* second, int32_t threads) {
    if (blocks->tile_rows != 1 || q->rule == HOP_TWO_LEVEL || q->rule == HOP_GIVEN) return HOP_UNSUPPORTED;
    const hop::QuantizeCall call{*q,    *blocks,    x,     nullptr, false,  nullptr,
                                 noise, noise_bits, codes, scale,   second, threads, false};
    const hop::Product product{factor, turned != 0, seed, stream};
    return HOP_BY_LEVEL(quantize_product(call, product, dtype));
}
