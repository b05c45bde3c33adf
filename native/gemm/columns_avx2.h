// The functions of columns_plain.h, with AVX2. Included in a namespace (isa.h).

// Transposes 16 rows of `words` (8 or 16) words, `stride` bytes apart, to rows `out_stride` bytes apart; applies
// `change` to each vector.
template <class Change>
inline void turn(const uint8_t* from, int64_t stride, uint8_t* to, int64_t out_stride, Change change, int words = 16) {
    for (int row = 0; row < 16; row += 8)
        for (int column = 0; column < words; column += 8) {
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

inline void scales_of_quads(int format, const uint8_t* quads, int at, float* scales) {
    const __m256i byte = _mm256_set1_epi32(255), magnitude = _mm256_set1_epi32(127);
    for (int i = 0; i < kRows; i += 8) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quads + 4 * i));
        const __m256i code = _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(8 * at)), byte);
        if (format == HOP_E8M0) {  // the lowest code is subnormal, the highest is NaN
            const __m256i ends = _mm256_or_si256(_mm256_cmpeq_epi32(code, _mm256_setzero_si256()), _mm256_cmpeq_epi32(code, byte));
            const __m256i bits = _mm256_or_si256(_mm256_slli_epi32(code, 23), _mm256_and_si256(ends, _mm256_set1_epi32(0x400000)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(scales + i), bits);
            continue;
        }
        // Decoded like normal e4m3 numbers, subnormal ones come out too large, but below 2^-6, the smallest normal number.
        // The minimum with 2 x - 2^-6 corrects them and leaves the others unchanged.
        const __m256i own = _mm256_and_si256(code, magnitude), special = _mm256_cmpeq_epi32(own, magnitude);
        const __m256 normal = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(own, 20), _mm256_set1_epi32(120 << 23)));
        const __m256 size = _mm256_min_ps(normal, _mm256_fmadd_ps(normal, _mm256_set1_ps(2.f), _mm256_set1_ps(-0x1p-6f)));
        const __m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(magnitude, code), 24);
        const __m256i bits = _mm256_or_si256(sign, _mm256_and_si256(special, _mm256_set1_epi32(0x7fc00000)));
        _mm256_storeu_ps(scales + i, _mm256_or_ps(size, _mm256_castsi256_ps(bits)));
    }
}
