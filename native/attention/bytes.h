// Codes multiplied as bytes, four at a time. Included in a namespace, by the dot products of a level.

using RowCode = uint8_t;

HOP_INLINE void store_codes(RowCode* to, Ints codes) { store_as(to, __builtin_convertvector(codes, Codes)); }
HOP_INLINE Ints ints_from(const uint8_t* p) { return __builtin_convertvector(load_as<Codes>(p), Ints); }

// No fast path: keys are packed a quad at a time.
HOP_INLINE int64_t transpose_tokens(const int8_t*, int64_t, int64_t, uint8_t*) { return 0; }

// Interleaves four tokens of 16 channels.
HOP_INLINE void interleave(const int8_t* const rows[4], uint8_t* to) {
#if defined(__SSE2__)
    __m128i r[4];
    for (int i = 0; i < 4; ++i) r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i]));
    const __m128i a = _mm_unpacklo_epi8(r[0], r[1]), b = _mm_unpacklo_epi8(r[2], r[3]);
    const __m128i c = _mm_unpackhi_epi8(r[0], r[1]), d = _mm_unpackhi_epi8(r[2], r[3]);
    auto* out = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(out, _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(a, b));
    _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(c, d));
    _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(c, d));
#else
    for (int i = 0; i < kLanes; ++i)
        for (int t = 0; t < 4; ++t) to[4 * i + t] = uint8_t(rows[t][i]);
#endif
}
