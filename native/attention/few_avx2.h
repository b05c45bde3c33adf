// Products of few rows, which read keys and values in place: packing would cost more than it saves. Included in a
// namespace, after pack.h.

// Dot products of a row with 8 tokens of `width` elements, a multiple of 16.
HOP_INLINE Ints dots_of_tokens(const RowCode* row, const int8_t* const (&tokens)[8], int64_t width) {
    __m256i sums[8];
    HOP_UNROLL
    for (int t = 0; t < 8; ++t) sums[t] = _mm256_setzero_si256();
    for (int64_t e = 0; e < width; e += 16) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + e));
        HOP_UNROLL
        for (int t = 0; t < 8; ++t) {
            const __m256i y = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tokens[t] + e)));
            sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(x, y));
        }
    }
    HOP_UNROLL
    for (int t = 0; t < 4; ++t) sums[t] = _mm256_hadd_epi32(sums[2 * t], sums[2 * t + 1]);
    const __m256i low = _mm256_hadd_epi32(sums[0], sums[1]), high = _mm256_hadd_epi32(sums[2], sums[3]);
    return Ints(_mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)));
}

// Weighted sums over `tokens` values of 16 · N channels. If `tokens` is odd, there is one more weight, which is 0.
template <int N>
static HOP_ALONE void add_tokens(const RowCode* weights, const int8_t* v, int64_t stride, int64_t tokens, int32_t* out) {
    Ints sums[2 * N] = {};
    for (int64_t j = 0; j < tokens; j += 2) {
        const int8_t* rows[2] = {v + j * stride, v + least(j + 1, tokens - 1) * stride};
        const Four x = four(weights + j);
        HOP_UNROLL
        for (int p = 0; p < N; ++p) {
            const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[0] + 16 * p));
            const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[1] + 16 * p));
            sums[2 * p] = dot(sums[2 * p], x, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)));
            sums[2 * p + 1] = dot(sums[2 * p + 1], x, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b)));
        }
    }
    HOP_UNROLL
    for (int p = 0; p < 2 * N; ++p) store_as(out + 8 * p, sums[p]);
}

static bool is_few(const hop_attention& a) { return has_few_rows(a); }
