// softmax and log_softmax of a row (hop/impls/scaled/families/softmax.py). Included in a namespace (isa.h), after norm.h.

template <class T>
static void softmax_row(const RowsCall& c, const typename T::Word* x, int64_t n, float* __restrict__ y, float* __restrict__ e) {
    const Range range = range_of_row<T>(x, n);
    if (range.nan || !(range.high <= kLargest && range.high >= -kLargest)) {
        for (int64_t i = 0; i < n; ++i) y[i] = quiet_nan();
        return;
    }
    const float most = range.high;
    const bool logs = c.r.operation == HOP_LOG_SOFTMAX;
    for (int64_t i = 0; i < n; ++i) y[i] = T::widen(x[i]) - most;
    if (logs) __builtin_memcpy(e, y, size_t(n) * sizeof(float));
    float* own = logs ? e : y;
    evaluate_row(HOP_EXP, own, n);
    const double total = double(sum_of_steps<false>(own, n, Power(20))) * 0x1p-40;
    if (logs) {
        float log = float(total);
        evaluate_row(HOP_LOG, &log, 1);
        for (int64_t i = 0; i < n; ++i) y[i] -= log;
    } else {
        const float inverse = float(1.0 / total);
        for (int64_t i = 0; i < n; ++i) y[i] *= inverse;
    }
}
