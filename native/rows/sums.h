// Sums of rows in fixed point, as defined in hop/numerics/row_sums.py. Included in a namespace (isa.h), after
// numbers.h.
//
// An integer with more digits than a float is computed as an upper and a lower part. Adding a constant to each part
// leaves the integer in the low bits. Sums of kSummed parts fit in 32 bits.

constexpr int64_t kSummed = 512;
constexpr uint32_t kWholeBits = 0x4b400000;  // bits of kWhole

// The smallest and the largest element, if all are finite.
struct Range {
    float low, high;
    bool finite, nan;
    float amax() const { return -low > high ? -low : high; }
};

template <class T>
HOP_INLINE Range range_of_words(typename T::Word least, typename T::Word most, typename T::Signed top) {
    using Word = typename T::Word;
    constexpr Word sign = Word(~T::magnitude);
    // Words from the sign bit on increase with the magnitude, so the largest word is the smallest number, if any is
    // negative.
    const Word low = most & sign ? most : least, high = least & sign ? least : Word(top);
    const Word a = low & T::magnitude, b = high & T::magnitude, all = a > b ? a : b;
    return {T::widen(low), T::widen(high), all < T::infinity && Word(most & T::magnitude) < T::infinity,
            all > T::infinity || Word(most & T::magnitude) > T::infinity};
}

// The exponent of the largest power of two up to a magnitude; at least -126.
HOP_INLINE int exponent_below(float amax) {
    const int field = int(bits_of(amax) >> 23 & 0xff);
    return (field ? field : 1) - 127;
}

HOP_INLINE double power_of_two(int exponent) { 
    const uint64_t bits = uint64_t(exponent + 1023) << 52;
    double x;
    __builtin_memcpy(&x, &bits, 8);
    return x;
}

// 2^exponent as a product of two factors; the first is 1 if the power fits in float32.
struct Power {
    float first, second;
    explicit Power(int exponent)
        : first(exponent > 127 ? 0x1p64f : 1.0f), second(float(power_of_two(exponent > 127 ? exponent - 64 : exponent))) {}
};

struct Parts {
    int64_t high = 0, low = 0;
    void add(uint32_t upper, uint32_t lower, int64_t n) {
        high += int32_t(upper - uint32_t(n) * kWholeBits);
        low += int32_t(lower - uint32_t(n) * kWholeBits);
    }
};

#if defined(HOP_IN_AVX2)
#include "rows/sums_avx2.h"
#else
#include "rows/sums_plain.h"
#endif

// Returns Σ x in float64; amax bounds the magnitudes of x.
static double row_sum(const float* x, int64_t n, float amax) {
    const int e = exponent_below(amax);
    const Power by(20 - e);
    const int64_t steps = by.first == 1 ? sum_of_steps<false>(x, n, by) : sum_of_steps<true>(x, n, by);
    return double(steps) * power_of_two(e - 40);
}

// Returns Σ x², or Σ (x - mean)² if `centers`, and then sets y to x - mean. y may alias x.
template <bool centers>
static double row_sum_of_squares(const float* x, int64_t n, float mean, float amax, float* y) {
    const int e = exponent_below(amax);
    const Power by(20 - e);
    const int64_t steps = by.first == 1 ? sum_of_square_steps<false, centers>(x, n, mean, by, y)
                                        : sum_of_square_steps<true, centers>(x, n, mean, by, y);
    return double(steps) * power_of_two(2 * e - 40);
}
