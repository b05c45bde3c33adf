// Products of few rows (few_sums.h), compiled for each level: plain loops that compilers vectorize.

namespace {

constexpr int64_t kTerms = 1024;     // k at a time: the sum of 1,024 products of bytes fits in 31 bits
constexpr int64_t kColumns = 1024;   // int32 sums at a time: four rows of them fit in the first-level cache
constexpr int kTogether = 4;         // rows for which a code is loaded and widened once

// Rows of lhs as int16, padded with rows of zeros to a multiple of kTogether.
struct Rows {
    int16_t numbers[kFewSums][kTerms];

    template <class Code>
    void fill(const Job& job, int64_t first, int64_t count) {
        const auto* codes = static_cast<const Code*>(job.lhs.codes) + first * job.p.lhs.k_stride;
        for (int64_t i = 0; i < job.p.m; ++i)
            for (int64_t j = 0; j < count; ++j) numbers[i][j] = codes[i * job.p.lhs.row_stride + j * job.p.lhs.k_stride];
        for (int64_t i = job.p.m; i % kTogether; ++i) std::memset(numbers[i], 0, sizeof(numbers[i]));
    }
};

// Adds the dot products of R rows with each of `columns` rows of rhs codes that are contiguous along k.
template <int R, class Code>
HOP_ALONE void add_dots(const int16_t (*a)[kTerms], const Code* b, int64_t stride, int64_t count, int64_t columns,
                        uint32_t (*sums)[kColumns]) {
    for (int64_t n = 0; n < columns; ++n, b += stride) {
        int32_t own[R] = {};
        for (int64_t k = 0; k < count; ++k) {
            const int16_t code = b[k];
            HOP_UNROLL
            for (int i = 0; i < R; ++i) own[i] += a[i][k] * code;
        }
        for (int i = 0; i < R; ++i) sums[i][n] += static_cast<uint32_t>(own[i]);
    }
}

// Adds the products of R rows by four rows of codes that are contiguous along the columns, for whole vectors of
// columns; returns the number of columns done.
template <int R, class Code>
HOP_INLINE int64_t add_vectors(const int16_t (&a)[R][4], const Code* const (&b)[4], int64_t columns, uint32_t (*sums)[kColumns]) {
#if defined(HOP_IN_AVX2)
    const auto load = [](const Code* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); };
    const auto widen = [](__m128i x) { return std::is_signed<Code>::value ? _mm256_cvtepi8_epi16(x) : _mm256_cvtepu8_epi16(x); };
    int64_t n = 0;
    for (; n + 16 <= columns; n += 16) {
        const __m128i p = load(b[0] + n), q = load(b[1] + n), r = load(b[2] + n), s = load(b[3] + n);
        const __m256i first[2] = {widen(_mm_unpacklo_epi8(p, q)), widen(_mm_unpackhi_epi8(p, q))};
        const __m256i second[2] = {widen(_mm_unpacklo_epi8(r, s)), widen(_mm_unpackhi_epi8(r, s))};
        HOP_UNROLL
        for (int i = 0; i < R; ++i) {
            int32_t pairs[2];
            std::memcpy(pairs, a[i], sizeof(pairs));
            HOP_UNROLL
            for (int half = 0; half < 2; ++half) {
                auto* at = reinterpret_cast<__m256i*>(sums[i] + n + 8 * half);
                const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(_mm256_set1_epi32(pairs[0]), first[half]),
                                                     _mm256_madd_epi16(_mm256_set1_epi32(pairs[1]), second[half]));
                _mm256_store_si256(at, _mm256_add_epi32(_mm256_load_si256(at), sum));
            }
        }
    }
    return n;
#else
    return (void)a, (void)b, (void)columns, (void)sums, 0;
#endif
}

// Like `add_dots`, for codes that are contiguous along the columns: four k at a time, so that sums are loaded less
// often.
template <int R, class Code>
HOP_ALONE void add_rows(const int16_t (*a)[kTerms], const Code* b, int64_t stride, int64_t count, int64_t columns,
                        uint32_t (*sums)[kColumns]) {
    static const Code zeros[kColumns] = {};
    for (int64_t k = 0; k < count; k += 4) {
        const Code* rows[4];
        int16_t numbers[R][4];
        for (int j = 0; j < 4; ++j) {
            rows[j] = k + j < count ? b + (k + j) * stride : zeros;
            for (int i = 0; i < R; ++i) numbers[i][j] = k + j < count ? a[i][k + j] : int16_t{0};
        }
        for (int64_t n = add_vectors<R, Code>(numbers, rows, columns, sums); n < columns; ++n) {
            HOP_UNROLL
            for (int i = 0; i < R; ++i)
                sums[i][n] += static_cast<uint32_t>(numbers[i][0] * rows[0][n] + numbers[i][1] * rows[1][n] +
                                                    numbers[i][2] * rows[2][n] + numbers[i][3] * rows[3][n]);
        }
    }
}

template <int R, class Code>
void add(const Job& job, const Rows& rows, int64_t i, int64_t k, int64_t count, int64_t n, int64_t columns,
         uint32_t (*sums)[kColumns]) {
    const hop_operand& rhs = job.p.rhs;
    const auto* b = static_cast<const Code*>(job.rhs.codes) + n * rhs.row_stride + k * rhs.k_stride;
    if (rhs.k_stride == 1) add_dots<R>(rows.numbers + i, b, rhs.row_stride, count, columns, sums + i);
    else add_rows<R>(rows.numbers + i, b, rhs.k_stride, count, columns, sums + i);
}

template <class Code>
void few_sums_of(const Job& job, Rows& rows, uint32_t (*sums)[kColumns], int64_t n, int64_t columns) {
    const hop_product& p = job.p;
    std::memset(sums, 0, sizeof(*sums) * static_cast<size_t>(ceil_div(p.m, kTogether) * kTogether));
    for (int64_t k = 0; k < p.k; k += kTerms) {
        const int64_t count = p.k - k < kTerms ? p.k - k : kTerms;
        if (p.lhs.format == HOP_INT8) rows.fill<int8_t>(job, k, count);
        else rows.fill<uint8_t>(job, k, count);
        if (p.m == 1) add<1, Code>(job, rows, 0, k, count, n, columns, sums);
        else
            for (int64_t i = 0; i < p.m; i += kTogether) add<kTogether, Code>(job, rows, i, k, count, n, columns, sums);
    }
}

}  // namespace

void few_sums(const Job& job) {
    const hop_product& p = job.p;
    const int threads = worth(job.threads, p.n * p.k / 65536 + 1, 1);
    const int64_t fair = ceil_div(ceil_div(p.n, threads), 64) * 64, width = fair < kColumns ? fair : kColumns;
    Queue queue(ceil_div(p.n, width));
    parallel(threads, [&](int, int) {
        alignas(64) Rows rows;
        alignas(64) uint32_t sums[kFewSums][kColumns];
        for (int64_t begin, end; queue.take(begin, end);) {
            const int64_t n = begin * width, columns = p.n - n < width ? p.n - n : width;
            if (p.rhs.format == HOP_INT8) few_sums_of<int8_t>(job, rows, sums, n, columns);
            else few_sums_of<uint8_t>(job, rows, sums, n, columns);
            for (int64_t i = 0; i < p.m; ++i)
                std::memcpy(static_cast<int32_t*>(job.output) + i * p.output.row_stride + n, sums[i],
                            static_cast<size_t>(columns) * sizeof(int32_t));
        }
    });
}
