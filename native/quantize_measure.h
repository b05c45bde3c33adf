// What is known of the blocks of a strip. Included in a namespace (isa.h).

// One row of blocks of `size` columns.
template <class T>
HOP_INLINE void measure_row(const typename T::Word* x, int64_t cols, int64_t size, int rule, Stats& s) {
    int64_t at = 0, i = 0;
    if (rule != HOP_MINMAX && rule != HOP_ABSMEAN) {
        const int64_t groups = cols / size;
        if (size == 16) amax_of_groups<T, 16>(x, i = groups, s.high, s.known);
        if (size == 32) amax_of_groups<T, 32>(x, i = groups, s.high, s.known);
        at = i * size;
    }
    for (; at < cols; at += size, ++i) {
        const int64_t n = least(size, cols - at);
        if (rule == HOP_MINMAX) {
            range_of<T>(x + at, n, s.low[i], s.high[i], s.known);
        } else if (rule == HOP_ABSMEAN) {
            sum_of<T>(x + at, n, s.sum[i], s.count[i], s.known);
        } else {
            const float own = amax_of<T>(x + at, n, s.known);
            s.high[i] = own > s.high[i] ? own : s.high[i];
        }
    }
}

// One row of blocks of one column.
template <class T>
HOP_INLINE void measure_columns(const typename T::Word* __restrict__ x, int64_t cols, int rule, Stats& s) {
    float* __restrict__ high = s.high;
    float* __restrict__ low = s.low;
    if (rule == HOP_ABSMEAN) {
        for (int64_t i = 0; i < cols; ++i) sum_of<T>(x + i, 1, s.sum[i], s.count[i], s.known);
        return;
    }
    uint32_t odd = 0;
    for (int64_t i = 0; i < cols; ++i) {
        const uint32_t own = bits_of(T::widen(x[i])), m = own & kMagnitude;
        odd |= m >= kInfinity ? 1 : 0;
        const float known = float_of(m > kInfinity ? 0 : own);
        if (rule == HOP_MINMAX) {
            const float below = known < -kLargest ? -kLargest : known, above = known > kLargest ? kLargest : known;
            low[i] = below < low[i] ? below : low[i];
            high[i] = above > high[i] ? above : high[i];
        } else {
            const float magnitude = float_of(bits_of(known) & kMagnitude);
            high[i] = magnitude > high[i] ? magnitude : high[i];
        }
    }
    if (odd) s.known = false;
}

// Part of a strip.
template <class T>
static void measure(const QuantizeCall& c, const Strip& strip, const Unit& u, Stats& s) {
    const auto* x = static_cast<const typename T::Word*>(c.x);
    const int64_t size = c.blocks.tile_cols;
    for (int64_t r = 0; r < u.rows; ++r) {
        const auto* row = x + (strip.row + u.row + r) * c.blocks.row_stride + strip.col + u.col;
        if (size == 1) {
            measure_columns<T>(row, u.cols, c.q.rule, s);
        } else {
            measure_row<T>(row, u.cols, size, c.q.rule, s);
        }
    }
}
