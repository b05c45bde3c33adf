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

HOP_INLINE Rounded rounded(Floats x) {
    const Floats shifted = x + kWhole, off = number(bits(x - (shifted - kWhole)) & 0x7fffffff);
    return {bits(shifted) & 255, off > 0.5f - x * 0x1p-19f};
}

static uint8_t code_of(float x) {
    const float y = x * 255.0f;
    return uint8_t(bits_of(y + kWhole) & 255);
}

// The codes of n scores, a multiple of 16, of which `most` is the largest, into c; and of each times its share, if there
// are shares, into d. Returns the sum of the first.
template <bool Shared>
static int32_t probabilities(const float* x, int64_t n, float most, const float* share, uint8_t* c, uint8_t* d) {
    Ints total{};
    for (int64_t j = 0; j < n; j += kLanes) {
        const Floats t = load_as<Floats>(x + j) - most, y = times_255(t);
        Rounded own = rounded(y);
        Rounded shared{};
        if constexpr (Shared) {
            shared = rounded(y * load_as<Floats>(share + j));
            store_as(d + j, __builtin_convertvector(shared.codes, Codes));
        }
        store_as(c + j, __builtin_convertvector(own.codes, Codes));
        total += own.codes;
        if (__builtin_expect(any(own.close | shared.close), 0)) {
            for (int i = 0; i < kLanes; ++i) {
                if (!(own.close[i] | shared.close[i])) continue;
                const float e = functions::exactly(Function::exp, t[i]);
                const uint8_t code = code_of(e);
                total[i] += code - own.codes[i];
                c[j + i] = code;
                if constexpr (Shared) d[j + i] = code_of(e * share[j + i]);
            }
        }
    }
    return total_of(total);
}
