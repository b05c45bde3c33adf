// layer_norm and rms_norm of a row (hop/impls/scaled/families/norms.py). Included in a namespace (isa.h), after sums.h.

template <class T>
static void widen_row(const typename T::Word* __restrict__ x, int64_t n, float* __restrict__ y) {
    for (int64_t i = 0; i < n; ++i) y[i] = T::widen(x[i]);
}

static void evaluate_row(int function, float* y, int64_t n) { evaluate(Function(function), y, y, n); }

HOP_INLINE float quiet_nan() { return float_of(0x7fc00000); }

HOP_INLINE float reciprocal_root(double mean_of_squares, double eps) {
    return float(1.0 / __builtin_sqrt(mean_of_squares + eps));
}

// y = y * r * w + b
static void scale_row(float* __restrict__ y, int64_t n, float r, const float* __restrict__ w, const float* __restrict__ b) {
    if (w && b) {
        for (int64_t i = 0; i < n; ++i) y[i] = y[i] * r * w[i] + b[i];
    } else if (w) {
        for (int64_t i = 0; i < n; ++i) y[i] = y[i] * r * w[i];
    } else if (b) {
        for (int64_t i = 0; i < n; ++i) y[i] = y[i] * r + b[i];
    } else {
        for (int64_t i = 0; i < n; ++i) y[i] = y[i] * r;
    }
}

template <class T>
static void layer_norm_row(const RowsCall& c, const typename T::Word* x, int64_t n, float* y) {
    const Range range = range_of_row<T>(x, n);
    widen_row<T>(x, n, y);
    float mean = quiet_nan(), r = quiet_nan();
    if (range.finite) mean = float(row_sum(y, n, range.amax()) / double(n));
    // Differences are rounded, and so are those of the ends, which are the largest.
    const float above = range.high - mean, below = mean - range.low, amax = above > below ? above : below;
    if (range.finite && amax <= kLargest) {
        r = reciprocal_root(row_sum_of_squares<true>(y, n, mean, amax) / double(n), c.r.number);
    } else {
        for (int64_t i = 0; i < n; ++i) y[i] -= mean;
    }
    scale_row(y, n, r, c.weight, c.bias);
}

template <class T>
static void rms_norm_row(const RowsCall& c, const typename T::Word* x, int64_t n, float* y) {
    const Range range = range_of_row<T>(x, n);
    widen_row<T>(x, n, y);
    float r = quiet_nan();
    if (range.finite) r = reciprocal_root(row_sum_of_squares<false>(y, n, 0, range.amax()) / double(n), c.r.number);
    scale_row(y, n, r, c.weight, c.bias);
}
