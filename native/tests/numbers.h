// The values of codes and bits: a second, straightforward implementation.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "hop.h"

inline bool narrow(int format) { return format == HOP_INT4 || format == HOP_UINT4 || format == HOP_E2M1; }
inline bool whole(int format) { return format >= HOP_INT8 && format <= HOP_UINT4 && format != HOP_E2M1; }

inline int bytes_of(int format) {
    return format == HOP_FLOAT32 || format == HOP_INT32 ? 4 : format == HOP_BFLOAT16 || format == HOP_FLOAT16 ? 2 : 1;
}

// x rounded to `digits` significant bits, to nearest, ties to even; the last bit is at least 2^least.
inline double rounded(double x, int digits, int least, int most) {
    if (!std::isfinite(x) || x == 0) return x;
    int exponent;
    std::frexp(x, &exponent);
    const int last = exponent - digits > least ? exponent - digits : least;
    const double y = std::ldexp(std::nearbyint(std::ldexp(x, -last)), last);
    return std::fabs(y) >= std::ldexp(1, most) ? std::copysign(INFINITY, x) : y;
}

inline double rounded(double x, int format) {
    return format == HOP_FLOAT32    ? rounded(x, 24, -149, 128)
           : format == HOP_BFLOAT16 ? rounded(x, 8, -133, 128)
                                    : rounded(x, 11, -24, 16);
}

inline double small_float(int code, int exponent_bits, int mantissa_bits, int bias) {
    const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1),
              mantissa = code & ((1 << mantissa_bits) - 1);
    const double size = exponent ? std::ldexp(1 + mantissa * std::ldexp(1, -mantissa_bits), exponent - bias)
                                 : std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return code >> (exponent_bits + mantissa_bits) & 1 ? -size : size;
}

// Element i of an array.
inline double element(int format, const void* data, int64_t i) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    const int nibble = narrow(format) ? bytes[i / 2] >> (i % 2 * 4) & 15 : 0;
    switch (format) {
        case HOP_NONE: return 1;
        case HOP_INT8: return static_cast<int8_t>(bytes[i]);
        case HOP_UINT8: return bytes[i];
        case HOP_INT4: return nibble < 8 ? nibble : nibble - 16;
        case HOP_UINT4: return nibble;
        case HOP_E2M1: return small_float(nibble, 2, 1, 1);
        case HOP_E4M3: return (bytes[i] & 127) == 127 ? NAN : small_float(bytes[i], 4, 3, 7);
        case HOP_E5M2:
            if ((bytes[i] & 127) > 124) return NAN;
            if ((bytes[i] & 127) == 124) return bytes[i] & 128 ? -INFINITY : INFINITY;
            return small_float(bytes[i], 5, 2, 15);
        case HOP_E8M0: return bytes[i] == 255 ? NAN : std::ldexp(1, bytes[i] - 127);
        case HOP_FLOAT32: return static_cast<const float*>(data)[i];
        case HOP_INT32: return static_cast<const int32_t*>(data)[i];
        default: break;
    }
    const int bits = static_cast<const uint16_t*>(data)[i], exponents = format == HOP_BFLOAT16 ? 8 : 5,
              digits = 15 - exponents;
    const int special = (1 << exponents) - 1;
    if ((bits >> digits & special) == special)
        return bits & ((1 << digits) - 1) ? NAN : bits >> 15 ? -INFINITY : INFINITY;
    return small_float(bits, exponents, digits, (1 << (exponents - 1)) - 1);
}
