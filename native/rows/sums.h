// Sums of rows in fixed point, as hop/numerics/row_sums.py says. Included in a namespace (isa.h), after numbers.h.
//
// An integer of more digits than a float has is found in two parts, an upper and a lower one, each by adding a number that
// leaves it in the low bits. Parts of kSummed elements fit into 32 bits.

constexpr int64_t kSummed = 512;
constexpr uint32_t kWholeBits = 0x4b400000;  // of kWhole

// The least and the largest number, if all are finite.
struct Range {
    float low, high;
    bool finite, nan;
    float amax() const { return -low > high ? -low : high; }
};

template <class T>
HOP_INLINE Range range_of_words(typename T::Word least, typename T::Word most, typename T::Signed top) {
    using Word = typename T::Word;
    constexpr Word sign = Word(~T::magnitude);
    // Words from the sign bit on count up with magnitudes: the largest is the least number, if there is any below 0.
    const Word low = most & sign ? most : least, high = least & sign ? least : Word(top);
    const Word a = low & T::magnitude, b = high & T::magnitude, all = a > b ? a : b;
    return {T::widen(low), T::widen(high), all < T::infinity && Word(most & T::magnitude) < T::infinity,
            all > T::infinity || Word(most & T::magnitude) > T::infinity};
}

template <class T>
static Range range_of_row(const typename T::Word* __restrict__ x, int64_t n) {
    using Word = typename T::Word;
    using Signed = typename T::Signed;
    Word least = Word(~Word(0)), most = 0;
    Signed top = Signed(Word(~T::magnitude));
    for (int64_t i = 0; i < n; ++i) {
        const Word w = x[i];
        least = w < least ? w : least;
        most = w > most ? w : most;
        top = Signed(w) > top ? Signed(w) : top;
    }
    return range_of_words<T>(least, most, top);
}

// Of the power of two below a magnitude: at least -126.
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

// 2^exponent as two factors, of which the first is 1 where float32 holds the product.
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

// Σ rint(x · by · 2^20), where |x · by| <= 2^21.
template <bool tiny>
static int64_t sum_of_steps(const float* __restrict__ x, int64_t n, Power by) {
    Parts sum;
    for (int64_t done = 0; done < n; done += kSummed) {
        const int64_t end = least(n, done + kSummed);
        uint32_t upper = 0, lower = 0;
        for (int64_t i = done; i < end; ++i) {
            const float t = (tiny ? x[i] * by.first : x[i]) * by.second, s = t + kWhole, rest = t - (s - kWhole);
            upper += bits_of(s);
            lower += bits_of(rest * 0x1p20f + kWhole);
        }
        sum.add(upper, lower, end - done);
    }
    return sum.high * (1 << 20) + sum.low;
}

// x becomes x - mean; Σ rint(float32((x · by)²)), where |x · by| <= 2^21.
template <bool tiny, bool centers>
static int64_t sum_of_square_steps(float* __restrict__ x, int64_t n, float mean, Power by) {
    Parts sum;
    for (int64_t done = 0; done < n; done += kSummed) {
        const int64_t end = least(n, done + kSummed);
        uint32_t upper = 0, lower = 0;
        for (int64_t i = done; i < end; ++i) {
            const float d = centers ? x[i] - mean : x[i];
            if (centers) x[i] = d;
            const float t = (tiny ? d * by.first : d) * by.second, q = t * t, s = q * 0x1p-21f + kWhole;
            upper += bits_of(s);
            lower += bits_of(q - (s - kWhole) * 0x1p21f + kWhole);
        }
        sum.add(upper, lower, end - done);
    }
    return sum.high * (1 << 21) + sum.low;
}

// Σ x in float64, of a row of such a range.
static double row_sum(const float* x, int64_t n, float amax) {
    const int e = exponent_below(amax);
    const Power by(20 - e);
    const int64_t steps = by.first == 1 ? sum_of_steps<false>(x, n, by) : sum_of_steps<true>(x, n, by);
    return double(steps) * power_of_two(e - 40);
}

// Σ x² of x - mean, which x becomes, if `centers`.
template <bool centers>
static double row_sum_of_squares(float* x, int64_t n, float mean, float amax) {
    const int e = exponent_below(amax);
    const Power by(20 - e);
    const int64_t steps = by.first == 1 ? sum_of_square_steps<false, centers>(x, n, mean, by)
                                        : sum_of_square_steps<true, centers>(x, n, mean, by);
    return double(steps) * power_of_two(2 * e - 40);
}
