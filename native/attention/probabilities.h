// Converts scores to probabilities in uint8 (hop/impls/scaled/families/attention.py). Included in a namespace, after
// the dot products of a level.
//
// 255 · e^t is approximated with an error of at most 2^-20. If that does not determine the rounded integer, as for
// about one value in 2^13, the exponential is computed as in the reference.

// 255 · 2^f for f from -1/2 to 1/2, relative error 2^-23.4
constexpr float kPower[] = {0x1.fe0002p+7f, 0x1.618144p+7f, 0x1.ea0d1ep+5f, 0x1.c4f02ep+3f, 0x1.3bcf46p+1f, 0x1.5aacdcp-2f};

// Computes steps · e^t.
template <int steps, int V>
HOP_INLINE void powers(const Floats (&t)[V], Floats (&y)[V]) {
    constexpr float log2_e = 0x1.715476p+0f;
    Floats f[V];
    Ints exponent[V];
    const auto factor = [](int i) HOP_INLINED { return all(float(kPower[i] * (steps / 255.0))); };
    for (int v = 0; v < V; ++v) {
        const Floats least = larger(t[v], all(-24));
        const Floats shifted = fused(least, all(log2_e), all(kWhole));
        f[v] = fused(least, all(log2_e), kWhole - shifted);
        exponent[v] = bits(shifted) << 23;
        y[v] = factor(5);
    }
    for (int i = 4; i >= 0; --i)
        for (int v = 0; v < V; ++v) y[v] = fused(y[v], f[v], factor(i));
    for (int v = 0; v < V; ++v) y[v] = number(bits(y[v]) + exponent[v]);
}

struct Rounded {
    Ints codes;
    Floats off;  // above 1/2 if the approximation does not determine the rounding
};

// Rounds x to an integer.
HOP_INLINE Rounded rounded(Floats x) {
    const Ints codes = nearest(x);
    const Floats off = number(bits(x - __builtin_convertvector(codes, Floats)) & 0x7fffffff);
    return {codes, fused(x, all(0x1p-19f), off)};
}

template <int steps>
static int32_t code_of(float e) {
    return int32_t(bits_of(e * float(steps) + kWhole) & 0x3fffff);
}

template <int V>
struct Undecided {
    int32_t codes[V * kLanes];
    float off[V * kLanes];
};

// Recomputes the codes whose rounding is undecided, and stores them if c is not null. Returns the change of the sum of
// codes.
template <int steps, int V>
static HOP_ALONE int32_t decide(const float* x, const float* more, float most, const Undecided<V>& u, RowCode* c) {
    int32_t changed = 0;
    for (int i = 0; i < V * kLanes; ++i) {
        if (!(u.off[i] > 0.5f)) continue;
        const float t = (more ? x[i] + more[i] : x[i]) - most;
        const int32_t code = code_of<steps>(functions::exactly(Function::exp, t));
        changed += code - u.codes[i];
        if (c) c[i] = RowCode(code);
    }
    return changed;
}

// Computes V vectors at a time: the steps of a single vector depend on each other.
template <int steps, bool Stored, bool More, int V>
HOP_INLINE void probabilities_of(const float* x, const float* more, float most, RowCode* c, Ints& total, int32_t& changed) {
    Floats t[V], y[V];
    for (int v = 0; v < V; ++v) {
        t[v] = load_as<Floats>(x + v * kLanes);
        if constexpr (More) t[v] = t[v] + load_as<Floats>(more + v * kLanes);
        t[v] = t[v] - most;
    }
    powers<steps>(t, y);
    Rounded own[V];
    Floats off{};
    for (int v = 0; v < V; ++v) {
        own[v] = rounded(y[v]);
        if constexpr (Stored) store_codes(c + v * kLanes, own[v].codes);
        total += own[v].codes;
        off = larger(own[v].off, off);
    }
    if (__builtin_expect(any(off > 0.5f), 0)) {
        Undecided<V> u;
        for (int v = 0; v < V; ++v) {
            store_as(u.codes + v * kLanes, own[v].codes);
            store_as(u.off + v * kLanes, own[v].off);
        }
        changed += decide<steps>(x, more, most, u, c);
    }
}

// Computes rint(steps · e^(x - most)) of n scores, a multiple of kLanes, none of which is above `most`. Stores the
// codes if `Stored`, and returns their sum. With `More`, more[i] is added to each score.
template <int steps, bool Stored, bool More>
static HOP_ALONE int32_t probabilities(const float* x, const float* more, int64_t n, float most, RowCode* c) {
    Ints total{};
    int32_t changed = 0;
    const auto some = [&](auto vectors, int64_t j) HOP_INLINED {
        const float* own = More ? more + j : nullptr;
        probabilities_of<steps, Stored, More, vectors.value>(x + j, own, most, Stored ? c + j : nullptr, total, changed);
    };
    int64_t j = 0;
    for (; j + kVectors * kLanes <= n; j += kVectors * kLanes) some(std::integral_constant<int, kVectors>(), j);
    for (; j < n; j += kLanes) some(std::integral_constant<int, 1>(), j);
    return total_of(total) + changed;
}
