// From sums to what is stored. Included in a namespace (isa.h).

// Rows begin..end - 1 of the sums of a block with the zero points taken in, modulo 2^32:
// Σ (a - za)(b - zb) = Σ ab - za Σ b - zb Σ a + terms · za · zb.
template <bool LhsZero, bool RhsZero>
inline void center(int32_t* c, int begin, int end, const Side& lhs, const Side& rhs, int64_t terms) {
    for (int i = begin; i < end; ++i)
        for (int j = 0; j < kBlock; ++j) {
            auto x = static_cast<uint32_t>(c[i * kBlock + j]);
            const auto za = static_cast<uint32_t>(lhs.zero[i]), zb = static_cast<uint32_t>(rhs.zero[j]);
            if (LhsZero) x -= za * static_cast<uint32_t>(rhs.sum[j]);
            if (RhsZero) x -= zb * static_cast<uint32_t>(lhs.sum[i]);
            if (LhsZero && RhsZero) x += za * zb * static_cast<uint32_t>(terms);
            c[i * kBlock + j] = static_cast<int32_t>(x);
        }
}

inline void centered(const Job& job, int32_t* c, int begin, int end, const Side& lhs, const Side& rhs, int64_t terms) {
    const bool l = lhs_has_zero(job), r = has_zero(job.p.rhs);
    if (l && r) center<true, true>(c, begin, end, lhs, rhs, terms);
    else if (l) center<true, false>(c, begin, end, lhs, rhs, terms);
    else if (r) center<false, true>(c, begin, end, lhs, rhs, terms);
}
inline void centered(const Job&, float*, int, int, const Side&, const Side&, int64_t) {}

// The sums of a group on their way to y.
template <class Sum>
struct GroupSums {
    Sum* c;
    const Side *lhs, *rhs;
    int64_t terms;
    bool first;  // y is what they make
    float* y;
};

// The bias of a block's columns, in real numbers; zeros if there is none.
inline void load_bias(const Job& job, int64_t first, int columns, float* bias) {
    for (int j = 0; j < kBlock; ++j) bias[j] = 0.f;
    switch (job.p.output.bias_format) {
        case HOP_FLOAT32:
            std::memcpy(bias, static_cast<const float*>(job.bias) + first, sizeof(float) * columns);
            return;
        case HOP_BFLOAT16:
            for (int j = 0; j < columns; ++j) bias[j] = from_bfloat16(static_cast<const uint16_t*>(job.bias)[first + j]);
            return;
        case HOP_FLOAT16:
            for (int j = 0; j < columns; ++j) bias[j] = from_float16(static_cast<const uint16_t*>(job.bias)[first + j]);
            return;
        default: return;
    }
}

// `columns` elements, all 32 of a block in most cases.
template <class T>
inline void store_elements(T* out, const T* elements, int columns) {
    if (columns == kBlock) store_lines(out, elements, sizeof(T) * kBlock);
    else std::memcpy(out, elements, sizeof(T) * columns);
}

// One row of a block: y, plus the bias if there is one.
template <bool Biased>
inline void store_row(const Job& job, const float* y, const float* bias, int64_t at, int columns) {
    alignas(64) float sum[kBlock];
    alignas(64) uint16_t words[kBlock];
    for (int j = 0; j < kBlock; ++j) sum[j] = Biased ? y[j] + bias[j] : y[j];
    switch (job.p.output.format) {
        case HOP_FLOAT32: return store_elements(static_cast<float*>(job.output) + at, sum, columns);
        case HOP_BFLOAT16:
            for (int j = 0; j < kBlock; ++j) words[j] = to_bfloat16(sum[j]);
            break;
        default:
            for (int j = 0; j < kBlock; ++j) words[j] = to_float16(sum[j]);
    }
    store_elements(static_cast<uint16_t*>(job.output) + at, words, columns);
}

// One row of sums: (float(c) · s_lhs) · s_rhs, plus the bias.
template <bool Biased, class Sum>
inline void finish_row(const Job& job, const Sum* c, float scale, const float* scales, const float* bias, int64_t at, int columns) {
    alignas(64) float y[kBlock];
    for (int j = 0; j < kBlock; ++j) y[j] = static_cast<float>(c[j]) * scale * scales[j];
    store_row<Biased>(job, y, bias, at, columns);
}
