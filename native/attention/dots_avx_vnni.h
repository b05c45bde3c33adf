// Dot products of four bytes with AVX-VNNI. Included in a namespace, after lanes.h.

using RowCode = uint8_t;
using Quads = __m256i;  // 8 columns of four signed bytes
using Four = __m256i;   // four unsigned bytes, broadcast to all columns
constexpr int kRowsAtOnce = 6, kLinesAtOnce = 2, kVectors = 4;

HOP_INLINE Quads quads(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
HOP_INLINE Four four(const RowCode* p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    return _mm256_set1_epi32(bytes);
}
HOP_INLINE Ints dot(Ints sum, Four x, Quads y) { return Ints(_mm256_dpbusd_avx_epi32(__m256i(sum), x, y)); }
HOP_INLINE void store_codes(RowCode* to, Ints codes) {
    const __m256i x = __m256i(codes);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}
HOP_INLINE __m256i eight_quads(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Interleaves four tokens of 8 channels.
HOP_INLINE void interleave(const int8_t* const rows[4], uint8_t* to) {
    __m128i r[4];
    for (int i = 0; i < 4; ++i) r[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[i]));
    const __m128i a = _mm_unpacklo_epi8(r[0], r[1]), b = _mm_unpacklo_epi8(r[2], r[3]);
    auto* out = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(out, _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(a, b));
}

#include "attention/eight_lanes.h"
