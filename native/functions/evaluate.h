// Elementary functions of rows in float64, rounded to float32 once. Included in a namespace, after the lanes of a
// level.
//
// The relative error of each function is at most 2^-43. If that does not determine the float32 result, as for about one
// number in 2^17, or if the result is subnormal, functions::exactly computes it.

constexpr double kMagic = 0x1.8p52;  // adding it rounds to an integer, which is then in the low bits
constexpr uint64_t kSign = uint64_t(1) << 63;

template <int n>
HOP_INLINE V horner(const double (&c)[n], V x) {
    V y = set(c[n - 1]);
    for (int i = n - 2; i >= 0; --i) y = fused(y, x, set(c[i]));
    return y;
}

HOP_INLINE V magnitude(V x) { return number(both(bits(x), whole(~kSign))); }
HOP_INLINE V with_sign(V y, V x) { return number(either(both(bits(y), whole(~kSign)), both(bits(x), whole(kSign)))); }

// 2^(n / kParts) and e^r - 1, with n in the low bits of t.
struct Power {
    V two, rest;
};

// Uses a longer polynomial instead of a table.
HOP_INLINE Power power_without_table(V t, V r) {
    const V two = number(left<52>(sum(bits(t), whole(1023))));
    const V square = r * r, fourth = square * square;
    const auto& c = functions::kExpWhole;
    const V low = fused(fused(r, set(c[3]), set(c[2])), square, fused(r, set(c[1]), set(c[0])));
    const V high = fused(fused(r, set(c[7]), set(c[6])), square, fused(r, set(c[5]), set(c[4])));
    const V tail = fused(fused(set(c[8]), fourth, high), fourth, low);
    return {two, fused(tail, square, r)};
}

HOP_INLINE Power power(V t, V r) {
    if (kParts == 1) return power_without_table(t, r);
    const I n = bits(t);
    const V entry = lookup(functions::kPowers, n);
    const I exponent = left<48>(both(n, whole(~uint64_t(15))));
    const V square = r * r;
    const auto& c = functions::kExp;
    const V low = fused(r, set(c[1]), set(c[0])), high = fused(r, set(c[3]), set(c[2]));
    const V tail = fused(fused(square, set(c[4]), high), square, low);
    return {number(sum(bits(entry), exponent)), fused(tail, square, r)};
}

HOP_INLINE Power power_of_e(V x) {
    const V t = fused(x, set(0x1.71547652b82fep+0 * kParts), set(kMagic));  // kParts / ln 2
    const V n = t - set(kMagic);
    return power(t, fused(n, set(-0x1.62e42fefa39efp-1 / kParts), x));
}

HOP_INLINE V exp_of(V x) {
    const Power p = power_of_e(x);
    return fused(p.two, p.rest, p.two);
}

// The mask of lanes whose rounding is undecided.
HOP_INLINE int close(V y) {
    constexpr uint64_t allowed = 1024, half = uint64_t(1) << 28;
    const I low = both(sum(bits(y), whole(allowed - half)), whole(2 * half - 1));
    return at_most(low, whole(2 * allowed)) | between(magnitude(y), 0x1p-151, 0x1p-126);
}

struct Decided {
    HOP_INLINE int undecided(V, V y) { return close(y); }
};

struct Exp : Decided {
    HOP_INLINE V of(V x) { return exp_of(smaller(set(90), larger(set(-110), x))); }
};

struct Exp2 : Decided {
    HOP_INLINE V of(V x) {
        x = smaller(set(130), larger(set(-155), x));
        const V t = fused(x, set(kParts), set(kMagic)), n = t - set(kMagic);
        const Power p = power(t, fused(n, set(-1.0 / kParts), x) * set(0x1.62e42fefa39efp-1));
        return fused(p.two, p.rest, p.two);
    }
};

struct Tanh : Decided {
    HOP_INLINE V of(V x) {
        const Power p = power_of_e(smaller(set(40), larger(set(-40), x + x)));
        const V e = fused(p.two, p.rest, p.two - set(1));  // e^2x - 1
        return with_sign(over(e, e + set(2)), x);
    }
};

struct Sigmoid : Decided {
    HOP_INLINE V of(V x) {
        const V e = exp_of(set(0) - smaller(set(110), larger(set(-110), x)));
        return over(set(1), e + set(1));
    }
};

struct Silu : Decided {
    HOP_INLINE V of(V x) {
        x = larger(set(-110), x);
        return over(x, exp_of(set(0) - smaller(set(110), x)) + set(1));
    }
};

struct GeluTanh : Decided {
    HOP_INLINE V of(V x) {
        x = larger(set(-14), x);
        const V cube = x * x * x;
        const V w = fused(cube, set(0.044715), x) * set(-0x1.9884533d43651p+0);  // -2 sqrt(2 / pi)
        return over(x, exp_of(larger(set(-110), w)) + set(1));
    }
};

struct Gelu : Decided {
    HOP_INLINE V of(V x) {
        const V t = smaller(set(14.5), magnitude(x));
        const V inverse = over(set(1), t + set(3));
        const V tail = exp_of(t * t * set(-0.5)) * (horner(functions::kMills, (t - set(3)) * inverse) * inverse);
        return larger(set(-14.5), x) * where_negative(x, tail, set(1) - tail);
    }
};

struct Erf : Decided {
    HOP_INLINE V of(V x) {
        const V a = smaller(set(3.9999), magnitude(x));
        const V above = a - set(0.125), t = fused(above, set(4), set(kMagic));
        const V d = fused(t - set(kMagic), set(-0.25), above);
        V y = lookup(functions::kErf[functions::kErfDegree], bits(t));
        for (int i = functions::kErfDegree - 1; i >= 0; --i) y = fused(y, d, lookup(functions::kErf[i], bits(t)));
        return with_sign(y * a, x);
    }
};

struct Log {
    HOP_INLINE V of(V x) {
        const I b = bits(x);
        const I k = right<52>(sum(b, whole(uint64_t(9) << 48)));  // exponent + 1023, one more from 23/16 on
        const V m = number(difference(sum(b, whole(uint64_t(1023) << 52)), left<52>(k)));
        const I j = right<48>(b);
        const V r = fused(m, lookup(functions::kInverses, j), set(-1));
        const V exponent = number(either(k, whole(0x4330000000000000))) - set(0x1p52 + 1023);
        const V tail = fused(horner(functions::kLog, r) * r, r, r);
        return fused(exponent, set(0x1.62e42fefa39efp-1), lookup(functions::kLogs, j) + tail);
    }
    HOP_INLINE int undecided(V x, V y) {
        constexpr int all = (1 << kWidth) - 1;
        return close(y) | (all & ~between(x, 0, std::numeric_limits<double>::infinity()));
    }
};

struct Rsqrt : Decided {
    HOP_INLINE V of(V x) { return over(set(1), root(x)); }
};

template <class F>
void evaluate_by(Function f, const float* x, float* y, int64_t n) {
    float in[kWidth], out[kWidth];
    for (int64_t i = 0; i < n; i += kWidth) {
        const bool part = kWidth > 1 && n - i < kWidth;
        if (part) {
            for (int64_t k = 0; k < kWidth; ++k) in[k] = k < n - i ? x[i + k] : 1.0f;
        }
        const V v = load(part ? in : x + i);
        const V result = F::of(v);
        int left = F::undecided(v, result);
        float* to = part ? out : y + i;
        store(to, result);
        if (__builtin_expect(left, 0)) {
            store(in, v);
            for (int k = 0; k < kWidth; ++k)
                if (left >> k & 1) to[k] = functions::exactly(f, in[k]);
        }
        if (part) std::memcpy(y + i, out, static_cast<size_t>(n - i) * sizeof(float));
    }
}
