// Statistics of the blocks of a strip. Included in a namespace (isa.h).

template <class T, int size>
static void measure_groups(const typename T::Word* x, int64_t groups, int rule, Stats& s) {
    if (rule == HOP_MINMAX) {
        range_of_groups<T, size>(x, groups, s.low, s.high, s.known);
    } else {
        amax_of_groups<T, size>(x, groups, s.high, s.known);
    }
}

// Measures one row of blocks of `size` columns.
template <class T>
static void measure_row(const typename T::Word* x, int64_t cols, int64_t size, int rule, Stats& s) {
    const int64_t whole = rule == HOP_ABSMEAN ? 0 : cols / size;
    int64_t i = 0;
    if (size == 16) measure_groups<T, 16>(x, i = whole, rule, s);
    if (size == 32) measure_groups<T, 32>(x, i = whole, rule, s);
    if (size == 64) measure_groups<T, 64>(x, i = whole, rule, s);
    if (size == 128) measure_groups<T, 128>(x, i = whole, rule, s);
    if (size == 256) measure_groups<T, 256>(x, i = whole, rule, s);
    for (int64_t at = i * size; at < cols; at += size, ++i) {
        const int64_t n = least(size, cols - at);
        if (rule == HOP_MINMAX) {
            range_of_run<T>(x + at, n, s.low[i], s.high[i], s.known);
        } else if (rule == HOP_ABSMEAN) {
            sum_of<T>(x + at, n, s.sum[i], s.count[i], s.known);
        } else {
            const float own = amax_of_run<T>(x + at, n, s.known);
            s.high[i] = own > s.high[i] ? own : s.high[i];
        }
    }
}

// Measures blocks of one column. Magnitudes compare like their bits as integers.
template <class T>
static void measure_columns(const typename T::Word* x, const Unit& u, int64_t row_stride, int rule, Stats& s) {
    using Word = typename T::Word;
    Word top[kColumns] = {};
    for (int64_t r = 0; r < u.rows; ++r) {
        const Word* __restrict__ row = x + r * row_stride;
        for (int64_t i = 0; i < u.cols; ++i) {
            const Word m = row[i] & T::magnitude;
            top[i] = m > top[i] ? m : top[i];
        }
    }
    const bool known = top_of<T>(top, u.cols) < T::infinity;
    s.known = s.known && known;
    if (known && rule != HOP_MINMAX && rule != HOP_ABSMEAN) {
        for (int64_t i = 0; i < u.cols; ++i) {
            const float own = T::widen(top[i]);
            s.high[i] = own > s.high[i] ? own : s.high[i];
        }
        return;
    }
    for (int64_t r = 0; r < u.rows; ++r) {
        const Word* row = x + r * row_stride;
        float* __restrict__ high = s.high;
        float* __restrict__ low = s.low;
        for (int64_t i = 0; i < u.cols; ++i) {
            const float own = T::widen(row[i]), v = own == own ? own : 0.0f,
                        magnitude = float_of(bits_of(v) & kMagnitude);
            if (rule == HOP_MINMAX) {
                const float below = v < -kLargest ? -kLargest : v, above = v > kLargest ? kLargest : v;
                low[i] = below < low[i] ? below : low[i];
                high[i] = above > high[i] ? above : high[i];
            } else if (rule == HOP_ABSMEAN) {
                s.sum[i] += double(magnitude > kLargest ? kLargest : magnitude);
                s.count[i] += own == own;
            } else {
                high[i] = magnitude > high[i] ? magnitude : high[i];
            }
        }
    }
}

// Measures part of a strip.
template <class T>
static void measure(const QuantizeCall& c, const Strip& strip, const Unit& u, Stats& s) {
    const int64_t stride = c.blocks.row_stride;
    const auto* x = static_cast<const typename T::Word*>(c.x) + (strip.row + u.row) * stride + strip.col + u.col;
    if (c.blocks.tile_cols == 1) return measure_columns<T>(x, u, stride, c.q.rule, s);
    for (int64_t r = 0; r < u.rows; ++r) measure_row<T>(x + r * stride, u.cols, c.blocks.tile_cols, c.q.rule, s);
}
