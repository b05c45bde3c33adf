// Shared by the dot products of AVX2 and AVX-VNNI, which include it. They define eight_quads(p), which loads codes from
// p on in the format of lines.

HOP_INLINE Floats fused(Floats a, Floats b, Floats c) { return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
HOP_INLINE bool any(Ints mask) { return _mm256_movemask_ps(__m256(mask)) != 0; }
HOP_INLINE Ints ints_from(const uint8_t* p) { return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }

// Packs quads of 8 tokens into lines, 8 quads at a time. Returns the number of quads packed.
HOP_INLINE int64_t transpose_tokens(const int8_t* from, int64_t stride, int64_t quads, uint8_t* to) {
    int64_t c = 0;
    for (; c + 8 <= quads; c += 8) {
        __m256i r[8], s[8];
        for (int i = 0; i < 8; ++i) r[i] = eight_quads(from + i * stride + 4 / int(sizeof(RowCode)) * c);
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
