// Converts sums to stored results. Included in a namespace (isa.h).

// Applies the zero points to rows begin..end - 1 of a block's sums, modulo 2^32:
//
//     Σ (a - za)(b - zb) = Σ ab - za Σ b - zb Σ a + terms · za · zb
//
// __restrict__ keeps the compiler from reloading the sides for each sum, so the loop is vectorized.
template <bool LhsZero, bool RhsZero>
inline void center(int32_t* __restrict__ c, int begin, int end, const Side& lhs, const Side& rhs, int64_t terms) {
    for (int i = begin; i < end; ++i) {
        const auto za = static_cast<uint32_t>(lhs.zero[i]);
        const uint32_t of_row = static_cast<uint32_t>(lhs.sum[i]) - (LhsZero ? za * static_cast<uint32_t>(terms) : 0);
        for (int j = 0; j < kBlock; ++j) {
            auto x = static_cast<uint32_t>(c[i * kBlock + j]);
            if (LhsZero) x -= za * static_cast<uint32_t>(rhs.sum[j]);
            if (RhsZero) x -= static_cast<uint32_t>(rhs.zero[j]) * of_row;
            c[i * kBlock + j] = static_cast<int32_t>(x);
        }
    }
}

inline void centered(const Job& job, int32_t* c, int begin, int end, const Side& lhs, const Side& rhs, int64_t terms) {
    const bool l = lhs_has_zero(job), r = rhs_has_zero(job);
    if (l && r) center<true, true>(c, begin, end, lhs, rhs, terms);
    else if (l) center<true, false>(c, begin, end, lhs, rhs, terms);
    else if (r) center<false, true>(c, begin, end, lhs, rhs, terms);
}
inline void centered(const Job&, float*, int, int, const Side&, const Side&, int64_t) {}

// The sums of a group, to be added to y.
template <class Sum>
struct GroupSums {
    Sum* c;
    const Side *lhs, *rhs;
    int64_t terms;
    bool first;  // overwrite y instead of adding
    float* y;
};

// Loads the bias of a block's columns, in real values; zeros if there is none.
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

// Whether results with elements of this size bypass the cache, because it cannot hold the whole output.
inline bool is_past_cache(const Job& job, int64_t bytes) {
    constexpr int64_t large = 4 << 20;
    return job.p.m * job.p.n * bytes > large;
}

// Stores `columns` elements; in most cases all 32 columns of a block.
template <class T>
inline void store_elements(const Job& job, T* out, const T* elements, int columns) {
    if (columns == kBlock && is_past_cache(job, sizeof(T))) store_lines(out, elements, sizeof(T) * kBlock);
    else std::memcpy(out, elements, sizeof(T) * columns);
}

// The input of finish_rows: `rows` of sums, or, without scales, of values computed from them.
template <class Sum>
struct FinishedRows {
    const Sum* c;
    int rows, columns;
    const float *lhs, *rhs;  // scales; nullptr: none
    const float* bias;       // nullptr: none
    int64_t first_row, first_column;

    int64_t at(const Job& job, int row) const { return (first_row + row) * job.p.output.row_stride + first_column; }
};
