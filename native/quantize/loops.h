// The loops that are compiled once per dtype of x (Loops of quantize.h). Included in a namespace (isa.h), after
// elements.h.

// Sets the amax of each block whose scale is NaN to NaN: of blocks with a NaN, unless the codes keep NaN
// (HOP_MICROSCALING only under HOP_MX_RCEIL), and, for rules with float scales, of blocks with an infinity.
template <class T>
static HOP_SELDOM void mark_nan(const QuantizeCall& c, const Strip& s, float* high) {
    const hop_quantizer& q = c.q;
    const hop_blocks& g = c.blocks;
    const bool of_nan = !q.keeps_nan || (q.rule == HOP_MICROSCALING && q.rounding != HOP_MX_RCEIL);
    const bool of_infinity = q.rule == HOP_AMAX || q.rule == HOP_MINMAX || q.rule == HOP_CURRENT_SCALING;
    if (c.of_state || q.rule == HOP_ABSMEAN) return;
    const auto* x = static_cast<const typename T::Word*>(c.x);
    for (int64_t r = 0; r < s.rows; ++r) {
        const auto* row = x + (s.row + r) * g.row_stride + s.col;
        for (int64_t i = 0; i < s.cols; ++i) {
            const typename T::Word m = row[i] & T::magnitude;
            if (m > T::infinity ? of_nan : m == T::infinity && of_infinity) high[i / g.tile_cols] = float_of(0x7fc00000);
        }
    }
}

template <class T>
static float amax_of_row(const void* words, int64_t n) {
    bool known = true;
    const auto* x = static_cast<const typename T::Word*>(words);
#if defined(HOP_IN_AVX2)
    constexpr int64_t some = 512, ahead = 1024;  // elements; CPUs prefetch their lines too late
    float most = 0;
    for (int64_t i = 0; i < n; i += some) {
        for (int64_t line = 0; line < some; line += 32) fetch(x + i + ahead + line);
        const float own = amax_of_run<T>(x + i, least(some, n - i), known);
        most = own > most ? own : most;
    }
    return most;
#else
    return amax_of_run<T>(x, n, known);
#endif
}

template <class T>
static bool encode_words(const hop_quantizer& q, const FloatFormat& f, const void* x, int64_t n, int64_t size, const Factors& by,
                         bool known, bool fetches, uint8_t* out) {
    return encode_quickly<T>(q, f, static_cast<const typename T::Word*>(x), n, size, by, known, fetches, out);
}

template <class T>
static void widen(const void* words, int64_t n, const float* factor, float* out) {
    widen_line<T>(static_cast<const typename T::Word*>(words), n, factor, out);
}

template <class T>
static const Loops& loops_of() {
    static constexpr Loops loops{sizeof(typename T::Word), T::largest,      measure<T>, mark_nan<T>,
                                 amax_of_row<T>,           encode_words<T>, widen<T>};
    return loops;
}
