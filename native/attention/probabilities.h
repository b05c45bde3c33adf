// Scores to probabilities in uint8 (hop/impls/scaled/families/attention.py). Included in a namespace, after the dot products
// of a level.
//
// 255 · e^t is found within 2^-20 of itself; where that does not decide to which integer it is rounded, at about one number
// in 2^13, the exponential is found as the reference finds it.

// 255 · 2^f from -1/2 to 1/2; 2^-23.4
constexpr float kPower[] = {0x1.fe0002p+7f, 0x1.618144p+7f, 0x1.ea0d1ep+5f, 0x1.c4f02ep+3f, 0x1.3bcf46p+1f, 0x1.5aacdcp-2f};

// Vectors that are worked on side by side: each step waits for the one before it.
constexpr int kVectors = kLinesAtOnce > 1 ? 2 : 1;

// steps · e^t
template <int steps>
HOP_INLINE void powers(const Floats (&t)[kVectors], Floats (&y)[kVectors]) {
    constexpr float log2_e = 0x1.715476p+0f;
    Floats shifted[kVectors], f[kVectors];
    const auto factor = [](int i) HOP_INLINED { return all(float(kPower[i] * (steps / 255.0))); };
    for (int v = 0; v < kVectors; ++v) {
        const Floats least = larger(t[v], all(-24));
        shifted[v] = fused(least, all(log2_e), all(kWhole));
        f[v] = fused(least, all(log2_e), kWhole - shifted[v]);
        y[v] = factor(5);
    }
    for (int i = 4; i >= 0; --i)
        for (int v = 0; v < kVectors; ++v) y[v] = fused(y[v], f[v], factor(i));
    for (int v = 0; v < kVectors; ++v) y[v] = number(bits(y[v]) + (bits(shifted[v]) << 23));
}

struct Rounded {
    Ints codes;
    Floats off;  // above 1/2 where it is not decided
};

// x to an integer.
HOP_INLINE Rounded rounded(Floats x) {
    const Floats shifted = x + kWhole, off = number(bits(x - (shifted - kWhole)) & 0x7fffffff);
    return {bits(shifted) & 0x3fffff, fused(x, all(0x1p-19f), off)};
}

template <int steps>
static int32_t code_of(float e) {
    return int32_t(bits_of(e * float(steps) + kWhole) & 0x3fffff);
}

struct Undecided {
    float t[kVectors * kLanes];
    int32_t codes[kVectors * kLanes], close[kVectors * kLanes];
};

// Stores the codes that are not decided, if c is not null; what that adds to the sum of codes.
template <int steps>
static HOP_ALONE int32_t decide(const Undecided& u, RowCode* c) {
    int32_t changed = 0;
    for (int i = 0; i < kVectors * kLanes; ++i) {
        if (!u.close[i]) continue;
        const int32_t code = code_of<steps>(functions::exactly(Function::exp, u.t[i]));
        changed += code - u.codes[i];
        if (c) c[i] = RowCode(code);
    }
    return changed;
}

// rint(steps · e^(x - most)) of n scores, a multiple of kVectors · kLanes, none of which is above `most`: stored, if asked for, and their
// sum. To each score is added what `more` holds, if anything.
template <int steps, bool Stored, bool More>
static HOP_ALONE int32_t probabilities(const float* x, const float* more, int64_t n, float most, RowCode* c) {
    Ints total{};
    int32_t changed = 0;
    for (int64_t j = 0; j < n; j += kVectors * kLanes) {
        Floats t[kVectors], y[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            t[v] = load_as<Floats>(x + j + v * kLanes);
            if constexpr (More) t[v] = t[v] + load_as<Floats>(more + j + v * kLanes);
            t[v] = t[v] - most;
        }
        powers<steps>(t, y);
        Rounded own[kVectors];
        Floats off;
        for (int v = 0; v < kVectors; ++v) {
            own[v] = rounded(y[v]);
            if constexpr (Stored) store_codes(c + j + v * kLanes, own[v].codes);
            total += own[v].codes;
            off = v ? larger(own[v].off, off) : own[v].off;
        }
        if (__builtin_expect(any(off > 0.5f), 0)) {
            Undecided u;
            for (int v = 0; v < kVectors; ++v) {
                store_as(u.t + v * kLanes, t[v]);
                store_as(u.codes + v * kLanes, own[v].codes);
                store_as(u.close + v * kLanes, own[v].off > 0.5f);
            }
            changed += decide<steps>(u, Stored ? c + j : nullptr);
        }
    }
    return total_of(total) + changed;
}
