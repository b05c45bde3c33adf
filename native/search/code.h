// The search (search.h), compiled for each level.
//
// Each lane processes one block. An element is u units of its block, where u is an integer of so few bits that all sums
// of products with values of the format are exact in float32. Divisions, one per candidate and block, are in float64.

namespace {

#if defined(HOP_IN_AVX512)
constexpr int kLanes = 16;
#elif defined(HOP_IN_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using Words = int32_t __attribute__((vector_size(4 * kLanes)));
constexpr int kHalf = kLanes / 2;
using Half = float __attribute__((vector_size(4 * kHalf)));
using Wide = double __attribute__((vector_size(8 * kHalf)));  // the size of Lanes

constexpr float kLeast = 0x1p-100f;  // blocks of smaller elements keep their scales, because units would be subnormal
constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kWhole = 12582912.0f;  // 1.5 · 2^23: adding it rounds to integers, ties to even

HOP_INLINE Lanes load(const float* x) {
    Lanes v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}
HOP_INLINE void store(float* x, Lanes v) { std::memcpy(x, &v, sizeof(v)); }
HOP_INLINE Lanes all(float x) { return Lanes{} + x; }
HOP_INLINE Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
HOP_INLINE Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// Rounds numbers below 2^22 to the nearest integer.
HOP_INLINE Lanes nearest_integer(Lanes t) { return (t + kWhole) - kWhole; }

// Rounds magnitudes to e2m1: to multiples of half of their power of two, which is at least 1.
HOP_INLINE Lanes nearest_e2m1(Lanes m) {
    m = smaller(m, all(6.0f));
    const Lanes power = reinterpret_cast<Lanes>(reinterpret_cast<Words>(m) & 0x7f800000);
    const Lanes whole = larger(power, all(1.0f)) * (0.5f * kWhole);
    return (m + whole) - whole;
}

// kLanes blocks, interleaved element by element.
struct Group {
    alignas(64) float u[kMostSearched * kLanes];
    alignas(64) float unit[kLanes];   // NaN for a block that keeps its scale
    alignas(64) float least[kLanes];  // -u of the smallest element, at least 0
    int64_t first;
    int count;  // number of blocks; the other lanes are zeros
};

// Σ u q and Σ q² per lane, where q is the value of the format nearest to u · by.
HOP_INLINE void add_up(const Search& s, const Group& g, Lanes by, Lanes low, Lanes high, float* x, float* q) {
    Lanes xq = {}, qq = {};
    if (s.e2m1) {
        for (int i = 0; i < s.block; ++i) {
            const Lanes u = load(g.u + i * kLanes), magnitude = larger(u, -u), near = nearest_e2m1(magnitude * by);
            xq += magnitude * near, qq += near * near;
        }
    } else {
        for (int i = 0; i < s.block; ++i) {
            const Lanes u = load(g.u + i * kLanes), near = nearest_integer(smaller(larger(u * by, low), high));
            xq += u * near, qq += near * near;
        }
    }
    store(x, xq), store(q, qq);
}

HOP_INLINE void read(const Search& s, int64_t blocks, float shrink, Group& g) {
    for (int l = 0; l < kLanes; ++l) {
        const int64_t index = g.first + l, from = index % blocks * s.block, left = s.cols - from;
        const int n = l >= g.count ? 0 : static_cast<int>(left < s.block ? left : s.block);
        const float* x = s.x + (n ? index / blocks * s.cols + from : 0);
        for (int i = 0; i < n; ++i) g.u[i * kLanes + l] = x[i];
        for (int i = n; i < s.block; ++i) g.u[i * kLanes + l] = 0.0f;
    }
    Lanes above = {}, below = {}, nothing = {};
    for (int i = 0; i < s.block; ++i) {
        const Lanes v = load(g.u + i * kLanes);
        above = larger(v, above), below = larger(-v, below);
        nothing += v - v;  // NaN if an element is NaN or infinite
    }
    const Lanes size = s.kind == Searched::affine ? above + below : larger(above, below);
    const auto searched = (nothing == 0.0f) & (size >= kLeast) & (size <= kMost);
    const Lanes unit = searched ? size * shrink : all(std::numeric_limits<float>::quiet_NaN());
    const Lanes inverse = searched ? 1.0f / unit : Lanes{};
    for (int i = 0; i < s.block; ++i) {
        const Lanes v = load(g.u + i * kLanes);
        store(g.u + i * kLanes, searched ? nearest_integer(v * inverse) : Lanes{});
    }
    store(g.unit, unit), store(g.least, searched ? nearest_integer(below * inverse) : Lanes{});
}

HOP_INLINE Wide widened(const float* x) {
    Half v;
    std::memcpy(&v, x, sizeof(v));
    return __builtin_convertvector(v, Wide);
}

constexpr double kMargin = 1.0 + 0x1p-20;  // factor by which another scale's gain must exceed the rule's

HOP_INLINE Wide gain_of(Wide part, Wide xq, Wide qq) { return part * (2.0 * xq - part * qq); }

// The best candidate of each lane, negative for the scale of the rule, with its gain and value.
struct Best {
    Wide gain[2] = {}, value[2] = {}, candidate[2] = {Wide{} - 1.0, Wide{} - 1.0};

    // A NaN never replaces a gain.
    HOP_MEMBER void take(int half, Wide other, Wide of_other, double i) {
        const auto better = other > gain[half];
        gain[half] = better ? other : gain[half];
        value[half] = better ? of_other : value[half];
        candidate[half] = better ? Wide{} + i : candidate[half];
    }
    HOP_MEMBER bool found(int l) const { return at(l) >= 0; }
    HOP_MEMBER int at(int l) const { return static_cast<int>(candidate[l / kHalf][l % kHalf]); }
};

// Σ u² of half the lanes, exact.
HOP_INLINE Wide squares(const Search& s, const Group& g, int half) {
    Wide sum = {};
    for (int i = 0; i < s.block; ++i) {
        const Wide u = widened(g.u + i * kLanes + half * kHalf);
        sum += u * u;
    }
    return sum;
}

HOP_INLINE Lanes zeros_of(const Search& s, const Group& g, float by) {
    if (s.kind != Searched::affine) return Lanes{};
    return smaller(larger(s.low + nearest_integer(load(g.least) * by), all(s.low)), all(s.high));
}

// Finds the least-squares scales for the codes of the best candidate: a value to which the block's largest magnitude is
// mapped.
HOP_INLINE void fit(const Search& s, const Group& g, float shrink) {
    alignas(64) float x[kLanes], q[kLanes], scale[kLanes];
    for (int l = 0; l < kLanes; ++l) scale[l] = l < g.count ? s.scale[g.first + l] : 1.0f;
    Best best;
    for (int i = 0; i < s.count; ++i) {
        const Lanes zeros = zeros_of(s, g, s.candidates[i] * shrink);
        add_up(s, g, all(s.candidates[i] * shrink), s.low - zeros, s.high - zeros, x, q);
        for (int half = 0; half < 2; ++half) {
            const Wide xq = widened(x + half * kHalf), qq = widened(q + half * kHalf);
            if (i == 0) {
                const Wide part = widened(scale + half * kHalf) / widened(g.unit + half * kHalf);
                best.gain[half] = gain_of(part, xq, qq) * kMargin;
            }
            best.take(half, xq * xq / qq, xq / qq, i);
        }
    }
    for (int l = 0; l < g.count; ++l) {
        if (!best.found(l)) continue;
        s.scale[g.first + l] = static_cast<float>(static_cast<double>(g.unit[l]) * best.value[l / kHalf][l % kHalf]);
        if (s.kind == Searched::affine) s.zero_point[g.first + l] = zeros_of(s, g, s.candidates[best.at(l)] * shrink)[l];
    }
}

HOP_INLINE int moved(const Search& s, int code, int candidate) {
    const int at = code + static_cast<int>(s.candidates[candidate]);
    return at < 0 ? 0 : at > s.last ? s.last : at;
}

// Chooses the best of each scale's code and its neighbors, which are at the distances `candidates`.
HOP_INLINE void choose(const Search& s, const Group& g, int64_t blocks) {
    alignas(64) float x[kLanes], q[kLanes], value[kLanes], scale[kLanes], outer[kLanes];
    int code[kLanes] = {};
    for (int l = 0; l < kLanes; ++l) {
        if (l < g.count) code[l] = s.codes[g.first + l];
        outer[l] = s.outer && l < g.count ? s.outer[(g.first + l) / blocks * s.outer_stride] : 1.0f;
        if (code[l] > s.last) outer[l] = std::numeric_limits<float>::quiet_NaN();
    }
    const double extra = static_cast<double>(s.slack) - 1.0;  // errors are Σu² less the gain
    Best best;
    for (int i = 0; i < s.count; ++i) {
        for (int l = 0; l < kLanes; ++l) value[l] = s.values[moved(s, code[l], i)];
        const Lanes of_block = load(value) * load(outer) * s.factor, units = load(g.unit) / of_block;
        const auto valid = (of_block > 0.0f) & (units <= kMost);
        store(scale, valid ? of_block : all(std::numeric_limits<float>::quiet_NaN()));
        add_up(s, g, units, all(s.low), all(s.high), x, q);
        for (int half = 0; half < 2; ++half) {
            const Wide part = widened(scale + half * kHalf) / widened(g.unit + half * kHalf);
            const Wide xq = widened(x + half * kHalf), qq = widened(q + half * kHalf);
            const Wide gain = gain_of(part, xq, qq);
            if (i == 0) {
                const Wide least = gain * (kMargin + extra) - (extra == 0.0 ? Wide{} : extra * squares(s, g, half));
                best.gain[half] = gain > 0.0 ? least : Wide{};
            } else best.take(half, gain, part, i);
        }
    }
    for (int l = 0; l < g.count; ++l)
        if (best.found(l)) s.codes[g.first + l] = static_cast<uint8_t>(moved(s, code[l], best.at(l)));
}

}  // namespace

void search(const Search& s, int threads) {
    const int64_t blocks = (s.cols + s.block - 1) / s.block, count = s.rows * blocks;
    const float shrink = std::ldexp(1.0f, -s.bits);
    threads = worth(threads, s.rows * s.cols, int64_t(1) << 15);
    Queue queue((count + kLanes - 1) / kLanes, 32, threads);
    parallel(threads, [&](int, int) {
        Group g;
        int64_t begin, end;
        while (queue.take(begin, end))
            for (int64_t i = begin; i < end; ++i) {
                g.first = i * kLanes;
                g.count = static_cast<int>(count - g.first < kLanes ? count - g.first : kLanes);
                read(s, blocks, shrink, g);
                if (s.kind == Searched::code) choose(s, g, blocks);
                else fit(s, g, shrink);
            }
    });
}
