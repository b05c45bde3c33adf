// Converts the sums of pixels to stored results. Included in a namespace (isa.h), after requantize.h.

// The data of the 32 outputs of a panel, for one example.
struct Columns {
    alignas(64) float scale[kBlock];
    alignas(64) float bias[kBlock];
    alignas(64) int32_t sum[kBlock];   // sums of the weight's codes
    alignas(64) int32_t less[kBlock];  // subtracted from the sums: for the zero point, and an integer bias
    // If codes are computed by multiplication: s_lhs · s_rhs / scale, or 1 / scale; and the bounds minus the zero
    // point.
    alignas(64) float factor[kBlock];
    alignas(64) float least[kBlock], most[kBlock];
    int64_t first, example;  // the first output; the example that the data is for, or -1
    float lhs;
    int count;
    bool biased, finite;  // finite: no sum becomes NaN
    bool past;            // results bypass the cache in whole lines
    bool quick;  // factor is valid; if it is s_lhs · s_rhs / scale, `less` includes the bias
    alignas(64) Target target;
};

inline bool gives_codes(const Job& job) { return job.p.output.format == HOP_INT8 || job.p.output.format == HOP_UINT8; }

// Bytes of one element of the result.
inline int64_t result_bytes(const Job& job) {
    const int format = job.p.output.format;
    return gives_codes(job) ? 1 : format == HOP_FLOAT32 || format == HOP_INT32 ? 4 : 2;
}

inline void find_finite(Columns& c) {
    c.finite = std::fabs(c.lhs) < 0x1p90f;  // so that no sum becomes infinite before it is multiplied by a scale of 0
    for (int j = 0; j < kBlock; ++j) c.finite = c.finite && c.scale[j] - c.scale[j] == 0 && c.bias[j] - c.bias[j] == 0;
}

// Computes the factors if multiplying by them gives the right codes. `largest` bounds the sums minus the zero point.
__attribute__((noinline)) inline void find_factors(const hop_output& o, double largest, Columns& c) {
    const bool real = by_real(o);
    c.quick = false;
    if (!real && o.requantize != HOP_MULTIPLIER) return;
    // loops without branches, which the compiler vectorizes
    alignas(64) int32_t less[kBlock];
    int all = 1;
    for (int j = 0; j < kBlock; ++j) {
        c.least[j] = static_cast<float>(c.target.least[j] - c.target.zero[j]);
        c.most[j] = static_cast<float>(c.target.most[j] - c.target.zero[j]);
        all &= c.target.least[j] <= c.target.most[j];
    }
    if (real) {
        for (int j = 0; j < kBlock; ++j) {
            const float scale = c.target.scale[j];
            c.factor[j] = 1.f / scale;
            all &= (scale > 0x1p-100f) & (scale < 0x1p100f);
        }
        c.quick = all && c.finite;
        return;
    }
    for (int j = 0; j < kBlock; ++j) {
        c.factor[j] = c.lhs * c.scale[j] / c.target.scale[j];
        const double steps = std::rint(static_cast<double>(c.bias[j]) / (static_cast<double>(c.lhs) * c.scale[j]));
        const double own = c.biased && j < c.count ? steps : 0;
        const bool fits = std::fabs(own) < 0x1p31 - 1 - largest;  // whether their sum cannot saturate
        less[j] = static_cast<int32_t>(static_cast<uint32_t>(c.less[j]) - static_cast<uint32_t>(static_cast<int32_t>(fits ? own : 0)));
        all &= fits & (c.factor[j] - c.factor[j] == 0);
    }
    c.quick = all;
    if (c.quick) std::memcpy(c.less, less, sizeof(less));
}

template <class T>
inline void put(void* output, int64_t at, const T* elements, int count) {
    std::memcpy(static_cast<T*>(output) + at, elements, sizeof(T) * static_cast<size_t>(count));
}

// Stores rows of sums, the i-th at output + at[i]; rows with a negative at[i] are skipped.
inline void store_plainly(const hop_output& o, const Columns& c, const int32_t* sums, int rows, const int64_t* at,
                          void* output) {
    for (int i = 0; i < rows; ++i, sums += kBlock) {
        if (at[i] < 0) continue;
        int32_t own[kBlock];
        for (int j = 0; j < kBlock; ++j)
            own[j] = static_cast<int32_t>(static_cast<uint32_t>(sums[j]) - static_cast<uint32_t>(c.less[j]));
        if (o.format == HOP_INT32) {
            put(output, at[i], own, c.count);
            continue;
        }
        if (o.format == HOP_INT8 || o.format == HOP_UINT8) {
            const bool bias_in_sum = c.quick && o.requantize == HOP_MULTIPLIER;
            requantize_row(o, own, c.lhs, c.scale, c.biased && !bias_in_sum ? c.bias : nullptr, c.target,
                           static_cast<uint8_t*>(output) + at[i], c.count);
            continue;
        }
        float y[kBlock];
        uint16_t words[kBlock];
        for (int j = 0; j < kBlock; ++j) y[j] = static_cast<float>(own[j]) * c.lhs * c.scale[j];
        if (c.biased)
            for (int j = 0; j < kBlock; ++j) y[j] += c.bias[j];
        if (o.format == HOP_FLOAT32) {
            put(output, at[i], y, c.count);
            continue;
        }
        for (int j = 0; j < kBlock; ++j) words[j] = o.format == HOP_BFLOAT16 ? to_bfloat16(y[j]) : to_float16(y[j]);
        put(output, at[i], words, c.count);
    }
}
