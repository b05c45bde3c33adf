// Dot products of two int16 with AVX2; codes are widened to int16. Included in a namespace, after lanes.h.

using RowCode = int16_t;
using Quads = __m256i;  // 8 columns of two codes
using Four = __m256i;   // two codes, broadcast to all columns
constexpr int kRowsAtOnce = 6, kLinesAtOnce = 2, kVectors = 4;

HOP_INLINE Quads quads(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
HOP_INLINE Four four(const RowCode* p) {
    int32_t both;
    __builtin_memcpy(&both, p, 4);
    return _mm256_set1_epi32(both);
}
HOP_INLINE Ints dot(Ints sum, Four x, Quads y) { return Ints(_mm256_add_epi32(__m256i(sum), _mm256_madd_epi16(x, y))); }
HOP_INLINE Floats fused(Floats a, Floats b, Floats c) { return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
HOP_INLINE bool any(Ints mask) { return _mm256_movemask_ps(__m256(mask)) != 0; }
HOP_INLINE void store_codes(RowCode* to, Ints codes) {
    const __m256i x = __m256i(codes);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
HOP_INLINE Ints ints_from(const uint8_t* p) { return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }

// Packs quads of 8 tokens into lines, 8 quads at a time. Returns the number of quads packed.
HOP_INLINE int64_t transpose_tokens(const int8_t* from, int64_t stride, int64_t quads, uint8_t* to) {
    int64_t c = 0;
    for (; c + 8 <= quads; c += 8) {
        __m256i r[8], s[8];
        for (int i = 0; i < 8; ++i)
            r[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride + 2 * c)));
        for (int i = 0; i < 8; i += 2) s[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]), s[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
        for (int i = 0; i < 8; i += 4) {
            for (int k = 0; k < 2; ++k) {
                r[i + 2 * k] = _mm256_unpacklo_epi64(s[i + k], s[i + k + 2]);
                r[i + 2 * k + 1] = _mm256_unpackhi_epi64(s[i + k], s[i + k + 2]);
            }
        }
        auto* out = reinterpret_cast<__m256i*>(to + c * 32);
        for (int i = 0; i < 4; ++i) {
            _mm256_storeu_si256(out + i, _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
            _mm256_storeu_si256(out + i + 4, _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
        }
    }
    return c;
}

// Interleaves two tokens of 8 channels.
HOP_INLINE void interleave(const int8_t* const rows[2], uint8_t* to) {
    __m128i r[2];
    for (int i = 0; i < 2; ++i) r[i] = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[i])));
    auto* out = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(out, _mm_unpacklo_epi16(r[0], r[1]));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(r[0], r[1]));
}
