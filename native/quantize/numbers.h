// One element: floats of x, and codes. Included in a namespace (isa.h). Compilers vectorize loops over these functions,
// so they select instead of branching. Each operation is rounded as in the reference.

HOP_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

HOP_INLINE float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

constexpr uint32_t kInfinity = 0x7f800000, kMagnitude = 0x7fffffff;
constexpr float kLargest = 3.4028234663852886e38f;
constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits

// ---- dtypes of x

struct F32 {
    using Word = uint32_t;
    using Signed = int32_t;
    static constexpr Word infinity = kInfinity, magnitude = kMagnitude;
    static constexpr float largest = kLargest;
    HOP_INLINE float widen(Word w) { return float_of(w); }
    HOP_INLINE Word narrow(float x) { return bits_of(x); }
};

struct BF16 {
    using Word = uint16_t;
    using Signed = int16_t;
    static constexpr Word infinity = 0x7f80, magnitude = 0x7fff;
    static constexpr float largest = 3.3895313892515355e38f;
    HOP_INLINE float widen(Word w) { return float_of(uint32_t(w) << 16); }
    HOP_INLINE Word narrow(float x) {
        const uint32_t b = bits_of(x), rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
        return Word((b & kMagnitude) > kInfinity ? 0x7fc0 : rounded);
    }
};

struct F16 {
    using Word = uint16_t;
    using Signed = int16_t;
    static constexpr Word infinity = 0x7c00, magnitude = 0x7fff;
    static constexpr float largest = 65504.0f;
    HOP_INLINE float widen(Word w) {
        const uint32_t sign = uint32_t(w & 0x8000) << 16, m = w & 0x7fff;
        const uint32_t normal = (m << 13) + (m >= 0x7c00 ? 0x70000000 : 0x38000000);
        const uint32_t tiny = bits_of(float(int32_t(m)) * 0x1p-24f);
        return float_of(sign | (m < 0x400 ? tiny : normal));
    }
    HOP_INLINE Word narrow(float x) {
        const uint32_t b = bits_of(x), m = b & kMagnitude;
        const uint32_t tiny = bits_of(float_of(m) + 0.5f) - 0x3f000000;  // the last bit of the sum is 2^-24
        const uint32_t normal = (m - 0x38000000 + 0xfff + (m >> 13 & 1)) >> 13;
        const uint32_t high = m > kInfinity ? 0x7e00 : 0x7c00;
        return Word((b >> 16 & 0x8000) | (m < 0x38800000 ? tiny : m >= 0x47800000 ? high : normal));
    }
};

// All ones for the magnitude of a NaN. GCC turns a conditional expression into a branch, and then does not vectorize
// the loop.
HOP_INLINE uint32_t nan_mask(uint32_t magnitude) { return uint32_t(int32_t(kInfinity - magnitude) >> 31); }

// ---- float formats

HOP_INLINE FloatFormat float_format(const hop_quantizer& q) {
    FloatFormat f;
    f.mantissa = uint32_t(q.mantissa_bits);
    const uint32_t first = uint32_t(128 - q.bias), shift = 23 - f.mantissa;  // first: of code 1 << mantissa
    const uint32_t exponent = uint32_t(q.largest) >> f.mantissa;
    f.least = first << 23;
    if (exponent) {
        f.largest = ((first - 1) << 23) + (uint32_t(q.largest) << shift);
    } else {
        f.largest = bits_of(float(q.largest) * float_of((first - f.mantissa) << 23));
    }
    f.base = (first + shift) << f.mantissa;
    f.sign = uint32_t(q.bits - 1);
    f.keeps_nan = q.keeps_nan != 0;
    f.nan = f.keeps_nan ? 0x7f : uint32_t(q.largest);
    f.infinity = f.keeps_nan && q.largest == 0x7b ? 0x7c : ~0u;
    return f;
}

// `code`, or the code of NaN if `magnitude` is that of a NaN.
HOP_INLINE uint32_t or_nan(uint32_t magnitude, uint32_t code, const FloatFormat& f) {
    const uint32_t is_nan = nan_mask(magnitude);
    return (code & ~is_nan) | (f.nan & is_nan);
}

// The code of y, rounded to nearest, ties to even. Adding 2^(e + 23 - M) to a magnitude of exponent e rounds it to a
// multiple of the gap 2^(e - M), and leaves that multiple in the low bits.
template <bool known>
HOP_INLINE uint32_t encode_float(float y, const FloatFormat& f) {
    const uint32_t b = bits_of(y), own = b & kMagnitude, shift = 23 - f.mantissa;
    const uint32_t m = own < f.largest ? own : f.largest;
    const uint32_t e = m & kInfinity, unit = (e > f.least ? e : f.least) + (shift << 23);
    const uint32_t code = bits_of(float_of(m) + float_of(unit)) + (unit >> shift) - f.base;
    const uint32_t sign = b >> 31 << f.sign;
    return known ? code + sign : or_nan(own, code + sign, f);
}

// Stochastically rounds a number of steps, from 0 to 2^24, to whole steps: one more than the integer part if the
// fraction and the low 24 bits of `noise` add up to 1 or more.
HOP_INLINE uint32_t whole_steps(float steps, uint32_t noise) {
    const int32_t whole = int32_t(steps);
    return uint32_t(whole) + ((uint32_t(int32_t((steps - float(whole)) * 0x1p24f)) + (noise & 0xffffff)) >> 24);
}

// Like encode_float, rounded stochastically.
HOP_INLINE uint32_t encode_float_with(float y, uint32_t noise, const FloatFormat& f) {
    const uint32_t b = bits_of(y), own = b & kMagnitude, shift = 23 - f.mantissa;
    const uint32_t m = own < f.largest ? own : f.largest;
    const uint32_t e = m & kInfinity, exponent = e > f.least ? e : f.least;
    const float per_gap = float_of(((254 + f.mantissa) << 23) - exponent);
    const uint32_t steps = whole_steps(float_of(m) * per_gap, noise);
    const uint32_t code = steps + ((exponent - f.least) >> shift), sign = b >> 31 << f.sign;
    return or_nan(own, code + sign, f);
}

HOP_INLINE float decode_float(uint32_t code, const FloatFormat& f) {
    const uint32_t half = 1u << f.sign, m = code & (half - 1), shift = 23 - f.mantissa;
    const float normal = float_of((m << shift) + f.least - (1u << 23));
    const float tiny = float_of((m << shift) + f.least) - float_of(f.least);
    const float number = m < 1u << f.mantissa ? tiny : normal;
    const uint32_t above = m == f.infinity ? kInfinity : 0x7fc00000;
    const uint32_t known = bits_of(number) > f.largest ? above : bits_of(number);
    return float_of(known | (code & half) << (31 - f.sign));
}

// ---- scales

// e4m3, the format of block scales under HOP_TWO_LEVEL.
[[maybe_unused]] static FloatFormat inner_format() {
    hop_quantizer e4m3{};
    e4m3.bits = 8, e4m3.mantissa_bits = 3, e4m3.bias = 7, e4m3.largest = 0x7e, e4m3.keeps_nan = 1;
    return float_format(e4m3);
}

// e8m0: x rounded up to a power of two; 0 unless x is above 0.
HOP_INLINE uint32_t encode_power(float x) {
    const uint32_t b = bits_of(x), m = b & kMagnitude, exponent = m >> 23, rest = m & 0x7fffff;
    const uint32_t up = exponent + (rest > (exponent ? 0u : 0x400000u) ? 1 : 0), code = up < 254 ? up : 254;
    const uint32_t positive = b >> 31 ? 0 : code;
    return m > kInfinity ? 255 : positive;
}

// The e8m0 scale of a block with this amax, for all roundings but HOP_MX_RCEIL.
HOP_INLINE uint32_t encode_exponent(float amax, const hop_quantizer& q) {
    const uint32_t b = bits_of(amax), half = 1u << (22 - q.mantissa_bits), up = b + (b & 0x7fffff ? 1u << 23 : 0);
    const uint32_t rounded = q.rounding == HOP_MX_CEIL ? up : q.rounding == HOP_MX_EVEN ? b + half : b;
    const int32_t code = int32_t(rounded >> 23) - q.largest_power;
    return b > kInfinity ? 255 : uint32_t(code < 0 ? 0 : code);
}

HOP_INLINE float decode_power(uint32_t code) {
    const uint32_t known = code ? code << 23 : 0x400000;
    return float_of(code == 255 ? 0x7fc00000 : known);
}

// 1 / decode_power(code), exactly.
HOP_INLINE float inverse_power(uint32_t code) {
    const uint32_t known = code == 254 ? 0x400000 : (254 - code) << 23;
    return float_of(code == 255 ? 0x7fc00000 : known);
}

// The factor of elements under encode_exponent: the inverse of the scale, with the scale at least 2^-126, and infinite
// for NaN.
HOP_INLINE float inverse_exponent(uint32_t code) {
    return code == 255 ? 0.0f : code > 1 ? inverse_power(code) : 0x1p126f;
}

// The largest power of two, from 2^-128 to 2^127, that is at most x; NaN for NaN.
HOP_INLINE float floor_power(float x) {
    if (x != x) return x;
    const float power = float_of(bits_of(x) & kInfinity);
    if (x >= 0x1p-126f) return power < 0x1p127f ? power : 0x1p127f;
    return x < 0x1p-127f ? 0x1p-128f : 0x1p-127f;
}
