// Scores to probabilities in uint8 (hop/impls/scaled/families/attention.py). Included in a namespace, after the dot products
// of a level.
//
// 255 · e^t is found within 2^-20 of itself; where that does not decide to which integer it is rounded, at about one number
// in 2^13, the exponential is found as the reference finds it.

// 255 · 2^f from -1/2 to 1/2; 2^-23.4
constexpr float kPower[] = {0x1.fe0002p+7f, 0x1.618144p+7f, 0x1.ea0d1ep+5f, 0x1.c4f02ep+3f, 0x1.3bcf46p+1f, 0x1.5aacdcp-2f};

HOP_INLINE Floats times_255(Floats t) {
    const Floats w = larger(t, all(-24)) * 0x1.715476p+0f, shifted = w + kWhole;  // log2 e
    const Floats f = w - (shifted - kWhole);
    Floats y = all(kPower[5]);
    for (int i = 4; i >= 0; --i) y = fused(y, f, all(kPower[i]));
    return number(bits(y) + (bits(shifted) << 23));
}

struct Rounded {
    Ints codes, close;  // which lanes are not decided
};

// x to an integer of 0 to `most`.
template <int most>
HOP_INLINE Rounded rounded(Floats x) {
    const Floats shifted = x + kWhole, off = number(bits(x - (shifted - kWhole)) & 0x7fffffff);
    return {bits(shifted) & 0x3fffff, off > 0.5f - x * 0x1p-19f};
}

template <int steps>
static int32_t code_of(float e) {
    return int32_t(bits_of(e * float(steps) + kWhole) & 0x3fffff);
}

// rint(steps · e^(x - most)) of n scores, a multiple of kLanes, none of which is above `most`: stored, if asked for, and their
// sum. To each score is added what `more` holds, if anything.
template <int steps, bool Stored, bool More>
static HOP_ALONE int32_t probabilities(const float* x, const float* more, int64_t n, float most, RowCode* c) {
    Ints total{};
    for (int64_t j = 0; j < n; j += kLanes) {
        Floats t = load_as<Floats>(x + j);
        if constexpr (More) t = t + load_as<Floats>(more + j);
        t = t - most;
        Floats y = times_255(t);
        if constexpr (steps != 255) y = y * (float(steps) / 255.0f);
        const Rounded own = rounded<steps>(y);
        if constexpr (Stored) store_codes(c + j, own.codes);
        total += own.codes;
        if (__builtin_expect(any(own.close), 0)) {
            for (int i = 0; i < kLanes; ++i) {
                if (!own.close[i]) continue;
                const int32_t code = code_of<steps>(functions::exactly(Function::exp, t[i]));
                total[i] += code - own.codes[i];
                if constexpr (Stored) c[j + i] = RowCode(code);
            }
        }
    }
    return total_of(total);
}
