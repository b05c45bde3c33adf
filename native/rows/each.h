// Elementwise functions and gated products (hop/impls/scaled/families/functions.py). Included in a namespace (isa.h).

// Like clamp: NaN stays NaN.
HOP_INLINE float clamp_to_six(float x) { return x < 0 ? 0.0f : x > 6 ? 6.0f : x; }

// Functions made of sums and products, in place.
static void piecewise_row(int function, double number, float* __restrict__ y, int64_t n) {
    if (function == HOP_HARDSIGMOID) {
        for (int64_t i = 0; i < n; ++i) y[i] = clamp_to_six(y[i] + 3.0f) / 6.0f;
    } else if (function == HOP_HARDSWISH) {
        for (int64_t i = 0; i < n; ++i) y[i] = y[i] * clamp_to_six(y[i] + 3.0f) / 6.0f;
    } else {
        const float slope = float(number);
        for (int64_t i = 0; i < n; ++i) {
            const float scaled = y[i] * slope;
            y[i] = y[i] > 0 ? y[i] : scaled;
        }
    }
}

// Four at a time: compilers would use a gather instead, which is slower.
static void look_up(const float* table, const uint16_t* x, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        uint64_t words;
        __builtin_memcpy(&words, x + i, 8);
        const float found[4] = {table[words & 0xffff], table[words >> 16 & 0xffff], table[words >> 32 & 0xffff], table[words >> 48]};
        __builtin_memcpy(y + i, found, 16);
    }
    for (; i < n; ++i) y[i] = table[x[i]];
}

template <class T>
static void function_row(const RowsCall& c, const typename T::Word* x, int64_t n, float* y) {
    if (c.table) return look_up(c.table, reinterpret_cast<const uint16_t*>(x), n, y);
    widen_row<T>(x, n, y);
    if (c.r.function >= HOP_HARDSIGMOID) piecewise_row(c.r.function, c.r.number, y, n);
    else evaluate_row(c.r.function, y, n);
}

template <class T>
HOP_INLINE void multiply_by_words(const void* other, int64_t at, int64_t n, float* __restrict__ y) {
    const auto* __restrict__ b = static_cast<const typename T::Word*>(other) + at;
    for (int64_t i = 0; i < n; ++i) y[i] *= T::widen(b[i]);
}

static void multiply_row(const RowsCall& c, int64_t at, int64_t n, float* y) {
    switch (c.r.other_dtype) {
        case HOP_F32: return multiply_by_words<F32>(c.other, at, n, y);
        case HOP_BF16: return multiply_by_words<BF16>(c.other, at, n, y);
        default: return multiply_by_words<F16>(c.other, at, n, y);
    }
}
