// layer_norm and rms_norm of a row (hop/impls/scaled/families/norms.py). Included in a namespace (isa.h), after sums.h.

template <class T>
static void widen_row(const typename T::Word* __restrict__ x, int64_t n, float* __restrict__ y) {
    for (int64_t i = 0; i < n; ++i) y[i] = T::widen(x[i]);
}

// Returns the row in float32: x itself, or a copy in y.
template <class T>
HOP_INLINE const float* widened(const typename T::Word* x, int64_t n, float* y) {
    if (std::is_same<T, F32>::value) return reinterpret_cast<const float*>(x);
    widen_row<T>(x, n, y);
    return y;
}

static void evaluate_row(int function, float* y, int64_t n) { evaluate(Function(function), y, y, n); }

HOP_INLINE float quiet_nan() { return float_of(0x7fc00000); }

HOP_INLINE float reciprocal_root(double mean_of_squares, double eps) {
    return float(1.0 / __builtin_sqrt(mean_of_squares + eps));
}

// y = x(i) * r * w + b
template <class At>
HOP_INLINE void scale_each(const At x, int64_t n, float r, const float* __restrict__ w, const float* __restrict__ b,
                           float* __restrict__ y) {
    if (w && b) {
        for (int64_t i = 0; i < n; ++i) y[i] = x(i) * r * w[i] + b[i];
    } else if (w) {
        for (int64_t i = 0; i < n; ++i) y[i] = x(i) * r * w[i];
    } else if (b) {
        for (int64_t i = 0; i < n; ++i) y[i] = x(i) * r + b[i];
    } else {
        for (int64_t i = 0; i < n; ++i) y[i] = x(i) * r;
    }
}

// y = x * r * w + b; y is also the input if x is nullptr.
static void scale_row(const float* __restrict__ x, int64_t n, float r, const float* w, const float* b, float* __restrict__ y) {
    if (!x) return scale_each([y](int64_t i) HOP_INLINED { return y[i]; }, n, r, w, b, y);
    scale_each([x](int64_t i) HOP_INLINED { return x[i]; }, n, r, w, b, y);
}

template <class T>
static void layer_norm_row(const RowsCall& c, const typename T::Word* x, int64_t n, float* y) {
    const Range range = range_of_row<T>(x, n);
    const float* wide = widened<T>(x, n, y);
    float mean = quiet_nan(), r = quiet_nan();
    if (range.finite) mean = float(row_sum(wide, n, range.amax()) / double(n));
    // Differences are rounded; those of the ends of the range are the largest.
    const float above = range.high - mean, below = mean - range.low, amax = above > below ? above : below;
    if (range.finite && amax <= kLargest) {
        r = reciprocal_root(row_sum_of_squares<true>(wide, n, mean, amax, y) / double(n), c.r.number);
    } else {
        for (int64_t i = 0; i < n; ++i) y[i] = wide[i] - mean;
    }
    scale_row(nullptr, n, r, c.weight, c.bias, y);
}

template <class T>
static void rms_norm_row(const RowsCall& c, const typename T::Word* x, int64_t n, float* y) {
    const Range range = range_of_row<T>(x, n);
    const float* wide = widened<T>(x, n, y);
    float r = quiet_nan();
    if (range.finite) r = reciprocal_root(row_sum_of_squares<false>(wide, n, 0, range.amax(), y) / double(n), c.r.number);
    scale_row(wide == y ? nullptr : wide, n, r, c.weight, c.bias, y);
}
