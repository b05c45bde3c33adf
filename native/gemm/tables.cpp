#include <cmath>
#include <cstring>

#include "gemm/product.h"

namespace hop {
namespace {

constexpr int kShifted = HOP_E5M2 + 1;

uint16_t bits_of(float x) {  // x is a bfloat16 number
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(bits >> 16);
}

float of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

float number(int format, int code) {
    const auto real = [code](int exponent_bits, int mantissa_bits, int bias, int first_special, bool infinite) {
        const int magnitude = code & ((1 << (exponent_bits + mantissa_bits)) - 1);
        const float sign = code >> (exponent_bits + mantissa_bits) & 1 ? -1.f : 1.f;
        if (magnitude >= first_special) return sign * (infinite && magnitude == first_special ? INFINITY : NAN);
        const int exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
        const int whole = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
        return sign * std::ldexp(static_cast<float>(whole), (exponent ? exponent : 1) - bias - mantissa_bits);
    };
    switch (format) {
        case HOP_INT8: return static_cast<int8_t>(code);
        case HOP_UINT8: return static_cast<float>(code);
        case HOP_INT4: return static_cast<float>((code & 15) - (code & 8 ? 16 : 0));
        case HOP_UINT4: return static_cast<float>(code & 15);
        case HOP_E2M1: return real(2, 1, 1, 256, false);
        case HOP_E4M3: return real(4, 3, 7, 127, false);
        case HOP_E5M2: return real(5, 2, 15, 124, true);
        default: return static_cast<float>((code & 63) - 16);  // kShifted
    }
}

Decoder made(int format) {
    Decoder d{};
    d.codes = is_narrow(format) || format == kShifted ? 64 : format == HOP_E4M3 || format == HOP_E5M2 ? 128 : 256;
    d.special = format == HOP_E4M3 ? 127 : format == HOP_E5M2 ? 124 : 256;
    for (int code = 0; code < 256; ++code) {
        const uint16_t word = bits_of(number(format, code));
        d.low[code] = static_cast<uint8_t>(word);
        d.high[code] = static_cast<uint8_t>(word >> 8);
    }
    return d;
}

}  // namespace

const Decoder* shifted_decoder() { return decoder(kShifted); }

const Decoder* decoder(int format) {
    static const Decoder made_of[] = {made(HOP_INT8), made(HOP_UINT8), made(HOP_INT4), made(HOP_UINT4),
                                      made(HOP_E2M1), made(HOP_E4M3),  made(HOP_E5M2), made(kShifted)};
    return &made_of[(format >= HOP_INT8 && format <= kShifted ? format : kShifted) - HOP_INT8];
}

const float* scale_table(int format) {
    struct Tables {
        float e8m0[256], e4m3[256];
        Tables() {
            const Decoder& d = *decoder(HOP_E4M3);
            for (uint32_t code = 0; code < 256; ++code) {
                e8m0[code] = code == 255 ? NAN : of_bits(code ? code << 23 : 1u << 22);  // the smallest is subnormal
                e4m3[code] = of_bits(static_cast<uint32_t>(d.high[code] << 8 | d.low[code]) << 16);
            }
        }
    };
    static const Tables tables;
    return format == HOP_E8M0 ? tables.e8m0 : tables.e4m3;
}

}  // namespace hop
