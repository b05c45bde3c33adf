// From elements and factors to codes. Included in a namespace (isa.h).
//
// Rounding x / scale to an integer needs no division: with a and b a little above and below 1 / scale, the rounded
// quotient is between the rounded x * a and x * b. Only where these differ, near a tie, x is divided.

constexpr int kLanes = 16;  // elements at a time: one vector, or a few
constexpr float kAbove = 1.0f + 0x1p-20f, kBelow = 1.0f - 0x1p-20f;  // further from 1 than three roundings

// The parameters that all elements of a block share.
struct Run {
    float by;
    bool divides;
    bool known;    // elements are finite and the rule found the scale, so no code is out of bounds
    int32_t zero;  // the code of 0
};

// The tail of a run, in a small loop.
template <class T, class Encode>
static HOP_SELDOM void encode_rest(const typename T::Word* x, int64_t n, uint8_t* out, const Encode& encode) {
    for (int64_t i = 0; i < n; ++i) out[i] = encode(T::widen(x[i]));
}

// out[i] = encode(x[i])
template <class T, class Encode>
HOP_INLINE void each(const typename T::Word* x, int64_t n, uint8_t* __restrict__ out, const Encode encode) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        HOP_ONE_TURN;
        for (int j = 0; j < kLanes; ++j) out[i + j] = encode(T::widen(x[i + j]));
    }
    if (i < n) encode_rest<T>(x + i, n - i, out + i, encode);
}

// ---- integers

struct Bounds {
    float low, high;  // bounds of codes, minus the code of 0
    Bounds(float least, float most) : low(least), high(most) {}
    Bounds(const hop_quantizer& q, int32_t zero) : low(float(q.low - zero)), high(float(q.high - zero)) {}
};

HOP_INLINE int32_t code_of_zero(const hop_quantizer& q, uint8_t code) {
    return q.low < 0 ? int32_t(int8_t(code)) : int32_t(code);
}

// Parameters for products with reciprocals, for blocks of one column.
struct Columns {
    float above[kColumns], below[kColumns];
    float low[kColumns], high[kColumns];  // low, high, zero: one for all if there are no zero points
    int32_t zero[kColumns];
    HOP_ALONE void set(const hop_quantizer& q, const Factors& f, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            const float magnitude = float_of(bits_of(f.by[i]) & kMagnitude), inverse = 1.0f / f.by[i];
            // If the reciprocal cannot be used, everything but 0 gets two different codes, and is divided.
            const bool even = magnitude > 0x1p-100f && magnitude < 0x1p100f;
            above[i] = even ? inverse * kAbove : 0.0f;
            below[i] = even ? inverse * kBelow : float_of(kInfinity);
        }
        for (int64_t i = 0; i < (f.zero ? n : 1); ++i) {
            zero[i] = f.zero ? code_of_zero(q, f.zero[i]) : q.zero;
            low[i] = float(q.low - zero[i]);
            high[i] = float(q.high - zero[i]);
        }
    }
};

HOP_INLINE uint32_t encode_integer(float y, const Bounds& b, uint32_t zero) {
    const float known = y == y ? y : 0.0f;
    const float raised = known < b.low ? b.low : known, bounded = raised > b.high ? b.high : raised;
    return bits_of(bounded + kWhole) + zero;
}

// Encodes N elements, or `count` if N is 0.
template <class T, int N = 0>
static void encode_integers_exactly(const typename T::Word* x, int64_t count, const Bounds& b, const Run& run,
                                              uint8_t* out) {
    const int64_t n = N ? N : count;
    for (int64_t i = 0; i < n; ++i) out[i] = uint8_t(encode_integer(T::widen(x[i]) / run.by, b, uint32_t(run.zero)));
}

template <class T, bool bounded>
HOP_INLINE void encode_integers_by(const typename T::Word* x, int64_t n, const Bounds& b, const Run& run,
                                   uint8_t* out) {
    constexpr int step = 2 * kLanes;
    const float inverse = 1.0f / run.by, above = inverse * kAbove, below = inverse * kBelow;
    const uint32_t zero = uint32_t(run.zero);
    int64_t i = 0;
    for (; i + step <= n; i += step) {
        uint32_t differ = 0;
        for (int j = 0; j < step; ++j) {
            const float v = T::widen(x[i + j]);
            const uint32_t p = bounded ? encode_integer(v * above, b, zero) : bits_of(v * above + kWhole) + zero;
            const uint32_t q = bounded ? encode_integer(v * below, b, zero) : bits_of(v * below + kWhole) + zero;
            differ |= p ^ q;
            out[i + j] = uint8_t(p);
        }
        if (differ) encode_integers_exactly<T, step>(x + i, step, b, run, out + i);
    }
    if (i < n) encode_integers_exactly<T>(x + i, n - i, b, run, out + i);
}

template <class T>
static void encode_integers(const hop_quantizer& q, const typename T::Word* x, int64_t n, const Run& run,
                            uint8_t* out) {
    const Bounds b(q, run.zero);
    const float size = run.by < 0 ? -run.by : run.by;
    if (n < 2 * kLanes || !(size > 0x1p-100f && size < 0x1p100f)) {
        encode_integers_exactly<T>(x, n, b, run, out);
    } else if (run.known && q.rule == HOP_AMAX) {
        encode_integers_by<T, false>(x, n, b, run, out);
    } else {
        encode_integers_by<T, true>(x, n, b, run, out);
    }
}

HOP_INLINE uint8_t encode_integer_with(float y, uint32_t noise, const Bounds& b, uint32_t zero) {
    // In integers, to avoid branches: magnitudes up to 2^20, 0 for NaN.
    const uint32_t own = bits_of(y) & kMagnitude, most = bits_of(0x1p20f), negative = 0u - (bits_of(y) >> 31);
    const uint32_t steps = whole_steps(float_of((own < most ? own : most) & ~nan_mask(own)), noise);
    return uint8_t(encode_integer(float(int32_t((steps ^ negative) - negative)), b, zero));
}

// ---- floats

template <bool known, bool divides>
struct EncodeFloat {
    FloatFormat f;
    float by;
    HOP_MEMBER uint8_t operator()(float x) const { return uint8_t(encode_float<known>(divides ? x / by : x * by, f)); }
};

template <class T>
static void encode_floats(const FloatFormat& f, const typename T::Word* x, int64_t n, const Run& run, uint8_t* out) {
    if (run.divides) return each<T>(x, n, out, EncodeFloat<false, true>{f, run.by});
    if (run.known) return each<T>(x, n, out, EncodeFloat<true, false>{f, run.by});
    each<T>(x, n, out, EncodeFloat<false, false>{f, run.by});
}

// ---- codebooks

// Up to 16 values: the code counts the thresholds that y reaches.
struct EncodeFew {
    const hop_quantizer& q;
    float by;
    HOP_MEMBER uint8_t operator()(float x) const {
        const float y = x / by;
        uint32_t code = 0;
        for (int k = 1; k < 16; ++k) code += y >= q.thresholds[k] ? 1 : 0;
        return uint8_t(y == y ? code : uint32_t(q.zero_code));
    }
};

// The upper half of y's bits is an index; it leaves a choice of two codes.
struct EncodeIndexed {
    const uint8_t* index;
    const float* thresholds;
    uint32_t zero_code;
    float by;
    HOP_MEMBER uint8_t operator()(float x) const {
        const float y = x / by;
        const uint32_t code = index[bits_of(y) >> 16];
        return uint8_t(y == y ? code + (y >= thresholds[code + 1] ? 1 : 0) : zero_code);
    }
};

struct EncodeSearched {
    const hop_quantizer& q;
    float by;
    HOP_MEMBER uint8_t operator()(float x) const {
        const float y = x / by;
        int32_t code = 0;
        for (int32_t step = 128; step; step /= 2)
            if (code + step < q.size && y >= q.thresholds[code + step]) code += step;
        return uint8_t(y == y ? code : q.zero_code);
    }
};

template <class T>
static void encode_by_book(const hop_quantizer& q, const typename T::Word* x, int64_t n, const Run& run, uint8_t* out) {
    if (q.size <= 16) return each<T>(x, n, out, EncodeFew{q, run.by});
    if (q.index) return each<T>(x, n, out, EncodeIndexed{q.index, q.thresholds, uint32_t(q.zero_code), run.by});
    each<T>(x, n, out, EncodeSearched{q, run.by});
}

// ---- with noise: words of 24 bits, or bytes, which become the upper 8 bits

HOP_INLINE uint32_t in_24_bits(uint32_t noise) { return noise; }
HOP_INLINE uint32_t in_24_bits(uint8_t noise) { return uint32_t(noise) << 16; }

template <class Noise>
static void encode_floats_with(const FloatFormat f, const float* __restrict__ y, int64_t n,
                               const Noise* __restrict__ noise, uint8_t* __restrict__ out) {
    for (int64_t i = 0; i < n; ++i) out[i] = uint8_t(encode_float_with(y[i], in_24_bits(noise[i]), f));
}

// y = x in units of the format.
template <class T>
static void scale_block(const typename T::Word* __restrict__ x, int64_t n, float by, bool divides,
                        float* __restrict__ y) {
    int64_t i = 0;
    for (; !divides && i + kLanes <= n; i += kLanes)
        for (int j = 0; j < kLanes; ++j) y[i + j] = T::widen(x[i + j]) * by;
    for (; i < n; ++i) y[i] = divides ? T::widen(x[i]) / by : T::widen(x[i]) * by;
}

// encode_floats_with, directly from x.
template <class T, bool divides, class Noise>
static HOP_ALONE void encode_floats_of(const FloatFormat f, const typename T::Word* __restrict__ x, int64_t n, float by,
                                       const Noise* __restrict__ noise, uint8_t* __restrict__ out) {
    for (int64_t i = 0; i < n; ++i) {
        const float v = T::widen(x[i]);
        out[i] = uint8_t(encode_float_with(divides ? v / by : v * by, in_24_bits(noise[i]), f));
    }
}

template <class T, class Noise>
static HOP_ALONE void encode_integers_with(const Bounds& b, const typename T::Word* __restrict__ x, int64_t n, const Run& run,
                                           const Noise* __restrict__ noise, uint8_t* __restrict__ out) {
    const float by = run.by;
    const uint32_t zero = uint32_t(run.zero);
    for (int64_t i = 0; i < n; ++i) out[i] = encode_integer_with(T::widen(x[i]) / by, in_24_bits(noise[i]), b, zero);
}

// ---- blocks of one column

template <class T, bool divides>
static HOP_ALONE void encode_float_columns(const FloatFormat f, const typename T::Word* __restrict__ x, int64_t n,
                                 const float* __restrict__ by, uint8_t* __restrict__ out) {
    for (int64_t i = 0; i < n; ++i) {
        const float v = T::widen(x[i]);
        out[i] = uint8_t(encode_float<false>(divides ? v / by[i] : v * by[i], f));
    }
}

template <class T>
static HOP_ALONE void encode_integer_columns_exactly(const typename T::Word* x, int64_t begin, int64_t end, const float* by, bool affine,
                                                     const Columns& c, uint8_t* out) {
    for (int64_t k = begin; k < end; ++k) {
        const int64_t at = affine ? k : 0;
        out[k] = uint8_t(encode_integer(T::widen(x[k]) / by[k], Bounds{c.low[at], c.high[at]}, uint32_t(c.zero[at])));
    }
}

// Like encode_integers_by.
template <class T, bool affine>
static HOP_ALONE void encode_integer_columns(const typename T::Word* __restrict__ x, int64_t n, const float* by, const Columns& c,
                                             uint8_t* __restrict__ out) {
    constexpr int step = 2 * kLanes;
    int64_t i = 0;
    for (; i + step <= n; i += step) {
        uint32_t differ = 0;
        for (int j = 0; j < step; ++j) {
            const int64_t k = i + j, at = affine ? k : 0;
            const float v = T::widen(x[k]);
            const Bounds b{c.low[at], c.high[at]};
            const uint32_t p = encode_integer(v * c.above[k], b, uint32_t(c.zero[at]));
            differ |= p ^ encode_integer(v * c.below[k], b, uint32_t(c.zero[at]));
            out[k] = uint8_t(p);
        }
        if (differ) encode_integer_columns_exactly<T>(x, i, i + step, by, affine, c, out);
    }
    encode_integer_columns_exactly<T>(x, i, n, by, affine, c, out);
}

// ---- dispatch

// Encodes integers with noise with the instructions of a level (plain.h, codes_with_noise_avx512.h); returns false if
// the plain loops must do it.
template <class T, class Noise>
static bool encode_with_noise(const hop_quantizer& q, const typename T::Word* x, int64_t n, int64_t size, const Factors& by,
                              bool known, const Noise* noise, uint8_t* out);

struct Encoder {
    const hop_quantizer& q;
    FloatFormat f{};
    explicit Encoder(const hop_quantizer& quantizer) : q(quantizer) {
        if (q.format == HOP_FLOAT) f = float_format(q);
    }

    // The part of a block in one row.
    template <class T>
    void run(const typename T::Word* x, int64_t n, const Run& run, uint8_t* out) const {
        if (q.format == HOP_INTEGER) return encode_integers<T>(q, x, n, run, out);
        if (q.format == HOP_FLOAT) return encode_floats<T>(f, x, n, run, out);
        encode_by_book<T>(q, x, n, run, out);
    }

    Run run_of(const Factors& at, int64_t block, bool known) const {
        return {at.by[block], at.divides, known, at.zero ? code_of_zero(q, at.zero[block]) : q.zero};
    }

    // A row of blocks, with noise.
    template <class T, class Noise>
    HOP_ALONE void with(const typename T::Word* x, int64_t n, int64_t size, const Factors& at, bool known,
                        const Noise* noise, uint8_t* out) const {
        if (q.format == HOP_FLOAT && size >= 128) {
            for (int64_t begin = 0, i = 0; begin < n; begin += size, ++i) {
                const int64_t count = least(size, n - begin);
                if (at.divides) encode_floats_of<T, true>(f, x + begin, count, at.by[i], noise + begin, out + begin);
                else encode_floats_of<T, false>(f, x + begin, count, at.by[i], noise + begin, out + begin);
            }
            return;
        }
        if (q.format == HOP_FLOAT) {
            float y[kColumns];
            for (int64_t begin = 0, i = 0; begin < n; begin += size, ++i)
                scale_block<T>(x + begin, least(size, n - begin), at.by[i], at.divides, y + begin);
            return encode_floats_with(f, y, n, noise, out);
        }
        if (encode_with_noise<T>(q, x, n, size, at, known, noise, out)) return;
        for (int64_t begin = 0, i = 0; begin < n; begin += size, ++i) {
            const Run own = run_of(at, i, known);
            encode_integers_with<T>(Bounds(q, own.zero), x + begin, least(size, n - begin), own, noise + begin, out + begin);
        }
    }

    // A row of blocks of one column.
    template <class T>
    HOP_ALONE void columns(const typename T::Word* x, int64_t n, const Factors& at, const Columns* c, uint8_t* out) const {
        if (q.format == HOP_CODEBOOK) {
            for (int64_t i = 0; i < n; ++i) encode_by_book<T>(q, x + i, 1, run_of(at, i, false), out + i);
        } else if (q.format == HOP_INTEGER) {
            if (at.zero) encode_integer_columns<T, true>(x, n, at.by, *c, out);
            else encode_integer_columns<T, false>(x, n, at.by, *c, out);
        } else if (at.divides) {
            encode_float_columns<T, true>(f, x, n, at.by, out);
        } else {
            encode_float_columns<T, false>(f, x, n, at.by, out);
        }
    }
};

// ---- several codes per byte, the first in the lowest bits

static HOP_ALONE void pack(const uint8_t* __restrict__ codes, int64_t n, int32_t bits, uint8_t* __restrict__ out) {
    const int64_t whole = n * bits / 8;
    if (bits == 4) {
        for (int64_t i = 0; i < whole; ++i) out[i] = uint8_t((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
    } else if (bits == 2) {
        for (int64_t i = 0; i < whole; ++i) {
            const uint8_t* c = codes + 4 * i;
            out[i] = uint8_t((c[0] & 3) | (c[1] & 3) << 2 | (c[2] & 3) << 4 | c[3] << 6);
        }
    } else {
        for (int64_t i = 0; i < whole; ++i) {
            uint32_t byte = 0;
            for (int j = 0; j < 8; ++j) byte |= uint32_t(codes[8 * i + j] & 1) << j;
            out[i] = uint8_t(byte);
        }
    }
    const int64_t per_byte = 8 / bits, rest = n - whole * per_byte;
    if (rest) {
        uint32_t byte = 0;
        for (int64_t j = 0; j < rest; ++j)
            byte |= uint32_t(codes[whole * per_byte + j] & ((1 << bits) - 1)) << (j * bits);
        out[whole] = uint8_t(byte);
    }
}
