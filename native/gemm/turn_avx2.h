// Rows of words that become columns, and sums of columns, with AVX2. Included in a namespace (isa.h).

// 16 rows of 16 words, `stride` bytes apart, to rows `out_stride` bytes apart; each vector through `change`.
template <class Change>
inline void turn(const uint8_t* from, int64_t stride, uint8_t* to, int64_t out_stride, Change change) {
    for (int row = 0; row < 16; row += 8)
        for (int column = 0; column < 16; column += 8) {
            __m256i a[8], b[8];
            for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + (row + i) * stride + column * 4));
            for (int i = 0; i < 8; i += 2)
                b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
            for (int i = 0; i < 8; i += 4) {
                a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
                a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
            }
            uint8_t* at = to + column * out_stride + row * 4;
            const auto store = [&](int i, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + i * out_stride), change(x)); };
            for (int j = 0; j < 4; ++j) {
                store(j, _mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
                store(4 + j, _mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
            }
        }
}

// As in turn_plain.h.
HOP_ALONE inline void tile_from_rows(const uint8_t* src, int64_t stride, uint8_t* tile) {
    turn(src, stride, tile, 64, [](__m256i x) { return x; });
}

HOP_ALONE inline void numbers_from_rows(const uint8_t* src, int64_t stride, float factor, float* out, int64_t out_stride) {
    const __m256 by = _mm256_set1_ps(factor);
    turn(src, stride, reinterpret_cast<uint8_t*>(out), out_stride * 4, [by](__m256i x) { return _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(x), by)); });
}

inline void add_quads(const uint8_t* tile, int quads, int64_t steps, int64_t step, int32_t* sums) {
    const __m256i bytes = _mm256_set1_epi8(1), words = _mm256_set1_epi16(1);
    for (int half = 0; half < kRows; half += 8) {
        auto* out = reinterpret_cast<__m256i*>(sums + half);
        __m256i sum = _mm256_loadu_si256(out);
        const uint8_t* from = tile + half * 4;
        for (int64_t i = 0; i < steps; ++i, from += step) {
            __m256i pairs = _mm256_setzero_si256();
            for (int quad = 0; quad < quads; ++quad) {
                const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + quad * 64));
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(bytes, codes));
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, words));
        }
        _mm256_storeu_si256(out, sum);
    }
}
